"""Weights: which tensor of which file is which parameter, decided before any tensor is read.

`plan_weights` reads headers only and either accounts for everything (each parameter assigned
once, each tensor consumed, shapes as the config says) or raises one error that lists all that is wrong.
A tensor may have any readable dtype, whatever the config's: checkpoints mix them (norms in float32 inside
bfloat16), and the device converts to its own compute dtype. Arrays are views of memory maps: whoever
converts a parameter holds the only copy. Read next: `loader/safetensors.py`, `loader/parameters.py`.
"""

import logging
import math
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from loader.decoder import DecoderConfig
from loader.errors import CheckpointError, shown
from loader.fields import read_json_object
from loader.parameters import Shape, parameter_factor, parameter_table
from loader.safetensors import DTYPES, SafetensorsFile, open_safetensors

logger = logging.getLogger(__name__)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"

# Buffers that old exports saved; every model computes them from its config.
_IGNORED = re.compile(r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq|model\.rotary_emb\.inv_freq")

_COMPARE_ROWS = 4096


_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Modules that some files have as one tensor, one behind another."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor of a file, or some of its rows; float32 where it has a factor."""

    file: SafetensorsFile
    name: str
    rows: slice | None = None
    factor: float = 1.0

    @property
    def shape(self) -> Shape:
        whole = self.file.entries[self.name].shape
        return whole if self.rows is None else (self.rows.stop - self.rows.start, *whole[1:])

    @property
    def nbytes(self) -> int:
        entry = self.file.entries[self.name]
        return entry.nbytes if self.rows is None else entry.nbytes // entry.shape[0] * self.shape[0]

    def tensor(self) -> NDArray[Any]:
        whole = self.file.tensor(self.name)
        part = whole if self.rows is None else whole[self.rows]
        return part if self.factor == 1.0 else part.astype(np.float32) * np.float32(self.factor)


class WeightSource(Protocol):
    """Parameters by canonical name, in the order of the parameter table."""

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters in the dtypes they are stored in."""

    def tensor(self, name: str) -> NDArray[Any]:
        """Read-only array of bfloat16 (ml_dtypes), float16 or float32, in the table's shape."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """A WeightSource over checked safetensors files."""

    _parts: Mapping[str, _Part]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._parts)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts.values())

    def tensor(self, name: str) -> NDArray[Any]:
        """A view of the memory map, in the file's dtype; with a factor a copy, in float32."""
        return self._parts[name].tensor()


def plan_weights(path: Path, decoder: DecoderConfig) -> LoadPlan:
    """Account for every tensor in the checkpoint folder `path`.

    `model.safetensors` is read if it is there, else the shards that `model.safetensors.index.json` lists.
    A tied checkpoint may carry `lm_head.weight` if it equals the embedding (both are then read to compare).
    Raises CheckpointError.
    """
    if (path / SINGLE_FILE).exists():
        file = open_safetensors(path / SINGLE_FILE)
        files = dict.fromkeys(file.entries, file)
    elif (path / INDEX_FILE).exists():
        files = _open_shards(path)
    else:
        others = sorted(p.name for p in path.iterdir() if p.suffix in (".safetensors", ".bin", ".pth", ".gguf"))
        hint = f"; the folder has {', '.join(others)}" if others else ""
        raise CheckpointError(path, [f"has neither {SINGLE_FILE} nor {INDEX_FILE}{hint}"])
    table = parameter_table(decoder)
    found = {part: where for name, file in files.items() for part, where in _split(table, _Part(file, name)).items()}
    problems = _table_problems(table, found, decoder.tie_word_embeddings)
    if problems:
        raise CheckpointError(path, problems)
    if decoder.tie_word_embeddings and _HEAD in found:
        _check_tied_head(path, found)
        logger.warning("%s: %s repeats %s, and is not loaded", path, _HEAD, _EMBEDDING)
    _tell_of_strays(path, {file.path.name for file in files.values()})
    return LoadPlan({name: replace(found[name], factor=parameter_factor(decoder, name)) for name in table})


def _split(table: Mapping[str, Shape], whole: _Part) -> dict[str, _Part]:
    """The parameters that a tensor holds, by name: itself, or those it was fused of where their rows add up."""
    prefix, _, module = whole.name.removesuffix(".weight").rpartition(".")
    names = [f"{prefix}.{member}.weight" for member in _FUSED.get(module, ())]
    if whole.name in table or not names or any(name not in table for name in names):
        return {whole.name: whole}
    if whole.shape != (sum(table[name][0] for name in names), *table[names[0]][1:]):
        return {whole.name: whole}  # then it is no parameter of this model, and its parts are missing
    parts, start = {}, 0
    for name in names:
        parts[name] = _Part(whole.file, whole.name, slice(start, start + table[name][0]))
        start += table[name][0]
    return parts


def _tell_of_strays(path: Path, read: set[str]) -> None:
    """Warn of weights in the folder that the model does not have."""
    strays = sorted(file.name for file in path.glob("*.safetensors") if file.name not in read)
    if strays:
        more = f" and {len(strays) - 5} more" if len(strays) > 5 else ""
        logger.warning("%s: not read, as the model has no part in them: %s%s", path, ", ".join(strays[:5]), more)


def _open_shards(path: Path) -> dict[str, SafetensorsFile]:
    """The file of every tensor, by an index whose every entry has been checked against the shards."""
    index = path / INDEX_FILE
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(index, ["weight_map: expected an object from tensor to file"])
    problems: list[str] = []
    shards: dict[str, SafetensorsFile] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard:
            problems.append(f"weight_map: {shown(shard)} is not the name of a file in the folder")
        elif not (path / shard).is_file():
            names = [name for name, where in weight_map.items() if where == shard]
            problems.append(f"{shard}: the file is missing, and with it {', '.join(names)}")
        else:
            try:
                shards[shard] = open_safetensors(path / shard)
            except CheckpointError as error:
                problems.extend(f"{shard}: {problem}" for problem in error.problems)
    for shard, file in shards.items():
        named = {name for name, where in weight_map.items() if where == shard}
        problems.extend(f"{name}: the index places it in {shard}, which lacks it" for name in named - set(file.entries))
        problems.extend(f"{name}: is in {shard}, where the index has none" for name in set(file.entries) - named)
    if problems:
        raise CheckpointError(path, sorted(problems))
    return {name: shards[shard] for name, shard in weight_map.items()}


def _table_problems(table: Mapping[str, Shape], found: Mapping[str, _Part], tied: bool) -> list[str]:
    problems = []
    for name, shape in table.items():
        if name not in found:
            problems.append(f"{name}: is missing, expected shape {list(shape)}")
        elif found[name].shape != shape:
            problems.append(f"{name}: expected shape {list(shape)}, found {list(found[name].shape)}")
    for name in found:
        if name not in table and not _IGNORED.fullmatch(name) and not (tied and name == _HEAD):
            problems.append(f"{name}: is not a parameter of this model")
    return problems


def _check_tied_head(path: Path, found: Mapping[str, _Part]) -> None:
    embedding, head = found[_EMBEDDING].tensor(), found[_HEAD].tensor()
    blocks = (slice(start, start + _COMPARE_ROWS) for start in range(0, len(embedding), _COMPARE_ROWS))
    if head.shape != embedding.shape or not all(np.array_equal(head[rows], embedding[rows]) for rows in blocks):
        raise CheckpointError(path, [f"{_HEAD}: differs from {_EMBEDDING}, but tie_word_embeddings says they are one"])


@dataclass(frozen=True, slots=True)
class DummyWeights:
    """A WeightSource of random values: norms are 1, biases 0, the rest normal with deviation 0.02.

    Each tensor is made when asked for, from the seed and its name alone.
    """

    _table: Mapping[str, Shape]
    _dtype: np.dtype[Any]
    _seed: int

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._table)

    @property
    def nbytes(self) -> int:
        return sum(math.prod(shape) for shape in self._table.values()) * self._dtype.itemsize

    def tensor(self, name: str) -> NDArray[Any]:
        shape = self._table[name]
        if name.endswith("norm.weight"):
            values = np.ones(shape, np.float32)
        elif name.endswith(".bias"):
            values = np.zeros(shape, np.float32)
        else:
            rng = np.random.default_rng([self._seed, zlib.crc32(name.encode())])
            values = rng.standard_normal(shape, np.float32) * np.float32(0.02)
        values = values.astype(self._dtype, copy=False)
        values.flags.writeable = False
        return values


def dummy_weights(decoder: DecoderConfig, seed: int) -> DummyWeights:
    """Weights for `--load-format dummy`, in the checkpoint's dtype; equal seeds give equal weights."""
    dtype = {"bfloat16": DTYPES["BF16"], "float16": DTYPES["F16"], "float32": DTYPES["F32"]}[decoder.dtype]
    return DummyWeights(parameter_table(decoder), dtype, seed)
