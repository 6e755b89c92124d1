"""The rotary part of config.json, in both spellings, as a RopeConfig.

Old: `rope_scaling` (with `type` or `rope_type`) beside `rope_theta`. New: `rope_parameters`, which
holds the theta too. Both may be present as long as they agree. A kind that is not in `_KEYS`, or a key
its kind does not read, is refused by name.

`dynamic` stretches the angles of texts longer than max_position_embeddings, by their length, and of no others.
Nothing longer is served (`engine/devices/memory.py`): keys in the cache could not follow. So it is read as `default`.
"""

from collections.abc import Mapping
from typing import Any

from loader.decoder import RopeConfig
from loader.errors import shown
from loader.fields import Fields
from loader.rope import yarn_attention_factor

_KEYS: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "dynamic": frozenset({"factor"}),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    # `finetuned` is a note that the first YaRN checkpoints carry.
    "yarn": frozenset(
        {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"}
        | {"mscale", "mscale_all_dim", "truncate", "finetuned"}
    ),
}

_SPELLINGS = ("rope_scaling", "rope_parameters")


def read_rope(fields: Fields, max_position_embeddings: int, theta_is_explicit: bool) -> RopeConfig:
    """Read the rotary fields of a config.

    Args:
        theta_is_explicit: `rope_theta` stands in config.json rather than among the architecture's
            defaults, so that it must agree with the one in `rope_parameters`.
    """
    values, name = _merged(fields)
    rope = Fields(values, fields.problems, prefix=f"{name}.")
    kind = _kind(rope)
    theta = fields.number("rope_theta")
    if rope.get("rope_theta") is not None:
        inner = rope.number("rope_theta")
        if theta_is_explicit and inner != theta:
            rope.problem("rope_theta", f"{inner} contradicts rope_theta {theta}")
        theta = inner
    if theta <= 1.0:
        fields.problem("rope_theta", f"found {theta}, expected a number above 1")
    if kind not in _KEYS:
        rope.problem("rope_type", f"{shown(kind)} is not supported, expected one of {', '.join(_KEYS)}")
        return RopeConfig(kind="default", theta=theta)
    config = _scaled(rope, kind, theta, max_position_embeddings)
    for key in set(rope.unused()) - _KEYS[kind]:
        if (key, rope.values[key]) != ("partial_rotary_factor", 1.0):
            rope.problem(key, f"{shown(rope.values[key])} is not a parameter of rope_type {shown(kind)}")
    return config


def _merged(fields: Fields) -> tuple[dict[str, Any], str]:
    """Both spellings as one object, and the name to use for it in messages."""
    merged: dict[str, Any] = {}
    name = _SPELLINGS[0]
    for spelling in _SPELLINGS:
        value = fields.get(spelling)
        if value is None:
            continue
        if not isinstance(value, dict):
            fields.problem(spelling, f"found {shown(value)}, expected an object")
            continue
        name = spelling
        for key, item in value.items():
            key = "rope_type" if key == "type" else key
            if merged.get(key) is not None and item is not None and merged[key] != item:
                fields.problem(spelling, f"{key} {shown(item)} contradicts {shown(merged[key])}")
            merged[key] = merged.get(key) if item is None else item
    return merged, name


def _kind(rope: Fields) -> str:
    kind = rope.get("rope_type")
    if kind is None and rope.values.keys() - {"rope_theta"}:
        rope.problem("rope_type", "is missing")
    return "default" if kind is None else str(kind)


def _scaled(rope: Fields, kind: str, theta: float, max_position_embeddings: int) -> RopeConfig:
    if kind == "default":
        return RopeConfig(kind="default", theta=theta)
    factor = rope.number("factor")
    if factor < 1.0:
        rope.problem("factor", f"found {factor}, expected at least 1")
    if kind == "dynamic":
        return RopeConfig(kind="default", theta=theta)
    if kind == "linear":
        return RopeConfig(kind="linear", theta=theta, factor=factor)
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if high <= low:
            rope.problem("high_freq_factor", f"{high} is not above low_freq_factor {low}")
        return RopeConfig(
            kind="llama3",
            theta=theta,
            factor=factor,
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_position_embeddings=rope.size("original_max_position_embeddings"),
        )
    mscale, mscale_all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    derived = yarn_attention_factor(
        max(factor, 1.0),
        None if mscale is None else rope.number("mscale"),
        None if mscale_all_dim is None else rope.number("mscale_all_dim"),
    )
    return RopeConfig(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_max_position_embeddings=rope.size("original_max_position_embeddings", max_position_embeddings),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=rope.number("attention_factor", derived),
        truncate=rope.flag("truncate", True),
    )
