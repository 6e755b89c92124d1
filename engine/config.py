"""EngineConfig: every setting of the engine, with its default, its help text and its validation.

The command line derives its flags from these fields (`max_num_seqs` is `--max-num-seqs`), so a setting exists in one
place; a field's `Kind` says which values it takes, wherever they come from. `rpc.options.ServerOptions` is made in the
same way. Names and meanings follow vLLM where the thing exists there. Read next: `engine/cli/settings.py`.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from engine.errors import ConfigError
from loader.errors import shown

DeviceKind = Literal["auto", "cuda", "cpu"]
DType = Literal["auto", "bfloat16", "float16", "float32"]
LoadFormat = Literal["auto", "dummy"]
KVCacheDType = Literal["auto", "int8"]
Quantization = Literal["auto", "int8"]


def setting(default: Any, help: str, **bounds: float) -> Any:
    """A field of a dataclass of settings; `bounds` may hold `min` and `max`, both inclusive."""
    return field(default=default, metadata={"help": help, **bounds})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. Raises ConfigError from its constructor, naming the field."""

    model: str = field(metadata={"help": "Folder of a Hugging Face style checkpoint, its name on the hub, or a GGUF."})
    revision: str | None = setting(None, "Branch, tag or commit of a model on the hub; its main branch if unset.")
    served_model_name: str | None = setting(
        None, "Names clients may use, separated by commas; answers have the first. The folder's name if unset."
    )
    device: DeviceKind = setting("auto", "Where the model runs; auto picks cuda when it is there, else cpu.")
    dtype: DType = setting("auto", "Compute dtype; auto is bfloat16. float16 is for cuda, float32 for cpu.")
    load_format: LoadFormat = setting("auto", "dummy makes random weights from config.json alone.")
    generation_config: str = setting(
        "auto", "Where sampling defaults come from: auto is the model's folder, vllm is none, else a folder."
    )
    override_generation_config: str | None = setting(None, "JSON object of sampling defaults that go before those.")
    chat_template: str | None = setting(None, "File of a chat template in place of the model's own.")
    default_chat_template_kwargs: str | None = setting(
        None, "JSON object of variables for the chat template, under those that a request gives."
    )
    escape_special_tokens: bool = setting(
        False, "In chats, text of a message that spells a special token stays text; off as in vLLM."
    )
    max_model_len: int | None = setting(
        None, "Longest sequence, prompt and output; the model's own limit if unset.", min=1
    )
    max_num_seqs: int = setting(64, "Rows that run at once.", min=1, max=4096)
    max_num_batched_tokens: int | None = setting(
        None,
        "Token budget of one step; if unset, what the cpu computes in 0.25 s, 512 on cuda.",
        min=1,
        max=1 << 20,
    )
    max_queued_requests: int = setting(1024, "Requests that may wait; more are refused.", min=1)
    max_queued_requests_per_tenant: int | None = setting(
        None, "The same for each tenant by itself; no bound but the common one if unset.", min=1
    )
    stream_interval: int = setting(
        1, "Tokens of a choice per message of its stream; the first comes at once and the end is never kept.", min=1
    )
    block_size: int = setting(16, "Tokens in a KV block.", min=1, max=256)
    kv_cache_memory_bytes: int | None = setting(None, "Memory for KV blocks; a share of what is free if unset.", min=1)
    gpu_memory_utilization: float = setting(
        0.9, "Share of the GPU's memory that the engine may use, all other processes counted.", min=0.05, max=1.0
    )
    kv_cache_dtype: KVCacheDType = setting(
        "auto", "How keys and values are stored; auto is the compute dtype, int8 has a scale per token and head."
    )
    quantization: Quantization = setting(
        "auto", "auto leaves the weights as they are; int8 rounds them while loading (cpu: activations too, in groups)."
    )
    batch_invariant: bool = setting(
        False, "Same tokens whatever else is in the batch, without cuBLAS; the cpu device always does this."
    )
    enable_prefix_caching: bool = setting(True, "Reuse KV blocks of equal prefixes.")
    enable_chunked_prefill: bool = setting(True, "Split long prompts over steps.")
    long_prefill_token_threshold: int = setting(
        0, "Most tokens of one prompt in a step, so that a long one leaves room for others; 0 is no limit.", min=0
    )
    max_logprobs: int = setting(20, "Most alternatives a request may ask for per token.", min=0)
    seed: int = setting(0, "Seed from which unseeded requests draw theirs.", min=0, max=(1 << 63) - 1)
    cpu_threads: int | None = setting(
        None, "Threads of the cpu device; the processors this process may use if unset.", min=1, max=1024
    )
    otlp_traces_endpoint: str | None = setting(
        None, "URL of the collector that gets a span per request, OTLP over gRPC; needs the extra otel. Off if unset."
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens: {self.max_num_batched_tokens} is less than max_num_seqs "
                f"{self.max_num_seqs}, so that not every row could decode in a step"
            )
        if self.long_prefill_token_threshold and not self.enable_chunked_prefill:
            raise ConfigError(
                f"long_prefill_token_threshold: {self.long_prefill_token_threshold} needs enable_chunked_prefill"
            )

        for name in ("override_generation_config", "default_chat_template_kwargs"):
            json_object(name, getattr(self, name))

    @property
    def served_model_names(self) -> list[str]:
        """The names in `served_model_name`, [] if it is unset."""
        return [name.strip() for name in (self.served_model_name or "").split(",") if name.strip()]

    @property
    def token_budget(self) -> int:
        """`max_num_batched_tokens`, where it is set."""
        assert self.max_num_batched_tokens is not None
        return self.max_num_batched_tokens


_SPELLINGS = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}


_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?) ?(?P<prefix>[KMGT]?)(?P<binary>i?)B", re.IGNORECASE)


def size_text(text: str) -> str:
    """`1GiB` as a number of bytes, as text; what is no size stays as it is."""
    if (found := _SIZE.fullmatch(text)) is None or (found["binary"] and not found["prefix"]):
        return text
    base = 1024 if found["binary"] else 1000
    return str(int(float(found["number"]) * base ** " KMGT".index(found["prefix"].upper() or " ")))


class Kind:
    """What values a field takes: its type, whether None is one of them, and its bounds."""

    def __init__(self, f: Field[Any], hint: Any) -> None:
        self.optional = isinstance(hint, UnionType)
        base = next(h for h in get_args(hint) if h is not type(None)) if self.optional else hint
        self.choices: tuple[str, ...] = get_args(base) if get_origin(base) is Literal else ()
        self.type: type = str if self.choices else base
        self.low, self.high = f.metadata.get("min"), f.metadata.get("max")
        self.is_size = f.name.endswith("_bytes")

    @property
    def noun(self) -> str:
        """What the field takes, in words."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.is_size:
            return "a size in bytes, such as 1073741824, 1GiB or 512MB"
        return {bool: "true or false", int: "an integer", float: "a number", str: "a string"}[self.type]

    @property
    def metavar(self) -> str:
        """The same in a flag's help."""
        if self.is_size:
            return "SIZE"
        names = {bool: "true|false", int: "INTEGER", float: "NUMBER", str: "TEXT"}
        return f"[{'|'.join(self.choices)}]" if self.choices else names[self.type]

    def parse(self, text: str) -> Any:
        """The value that a flag or a variable spells. Raises ValueError."""
        if self.optional and text.lower() == "none":
            return None
        try:
            if self.is_size:
                text = size_text(text)
            value = _SPELLINGS[text.lower()] if self.type is bool else self.type(text)
        except (KeyError, ValueError):
            raise self._not(text) from None
        self.check(value)
        return value

    def take(self, value: Any) -> Any:
        """A value of a TOML file, which has types but no null. Raises ValueError."""
        if self.optional and isinstance(value, str) and value.lower() == "none":
            return None
        if self.is_size and isinstance(value, str):
            return self.parse(value)
        self.check(value)
        return float(value) if self.type is float else value

    def check(self, value: Any) -> None:
        """Raises ValueError for a value that the field does not take. An integer is a number, too."""
        if value is None and self.optional:
            return
        number = self.type in (int, float)
        fits = type(value) in (int, float) if self.type is float else type(value) is self.type
        if not fits or (self.choices and value not in self.choices) or (number and not math.isfinite(value)):
            raise self._not(value)
        if number and ((self.low is not None and value < self.low) or (self.high is not None and value > self.high)):
            limits = f"at least {self.low}" if self.high is None else f"between {self.low} and {self.high}"
            raise ValueError(f"{value} is out of range, must be {limits}")

    def _not(self, value: object) -> ValueError:
        return ValueError(f"{shown(value)} is not {self.noun}" + (", nor none" if self.optional else ""))


def kinds_of(config: type[Any]) -> dict[str, Kind]:
    """Each field of a dataclass of settings."""
    hints = get_type_hints(config)
    return {f.name: Kind(f, hints[f.name]) for f in fields(config)}


def check_settings(config: Any) -> None:
    """Raises ConfigError that names the first field of a dataclass of settings with a value that it does not take."""
    for name, kind in kinds_of(type(config)).items():
        try:
            kind.check(getattr(config, name))
        except ValueError as error:
            raise ConfigError(f"{name}: {error}") from None


def json_object(name: str, text: str | None) -> dict[str, Any]:
    """The object that a setting holds as JSON text, {} if it is unset. Raises ConfigError."""
    try:
        value = {} if text is None else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{name}: must be a JSON object")
    return value


def config_from_mapping(settings: Mapping[str, Any]) -> EngineConfig:
    """Build a config from loose settings. Raises ConfigError on a name that does not exist."""
    known = {f.name for f in fields(EngineConfig)}
    unknown = sorted(set(settings) - known)
    if unknown:
        raise ConfigError(f"unknown setting: {', '.join(unknown)}")
    return EngineConfig(**settings)
