"""Checkpoint files for tests, written without the code under test."""

import json
import math
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

GOLDEN = Path(__file__).parents[1] / "golden"
LLAMA = GOLDEN / "llama"

_NAMES = {np.dtype(ml_dtypes.bfloat16): "BF16", np.dtype(np.float16): "F16", np.dtype(np.float32): "F32"}


def raw_file(path: Path, header: Mapping[str, Any] | str, data: bytes) -> Path:
    """A safetensors file with any header, right or wrong."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def tensor_file(path: Path, tensors: Mapping[str, np.ndarray]) -> Path:
    """A valid safetensors file."""
    header, data = {}, b""
    for name, array in tensors.items():
        end = len(data) + array.nbytes
        header[name] = {"dtype": _NAMES[array.dtype], "shape": list(array.shape), "data_offsets": [len(data), end]}
        data += array.tobytes()
    text = json.dumps(header)
    return raw_file(path, text + " " * (-len(text) % 8), data)


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Every tensor of a valid file, as copies, by a reader of its own."""
    blob = path.read_bytes()
    (length,) = struct.unpack("<Q", blob[:8])
    header = json.loads(blob[8 : 8 + length])
    header.pop("__metadata__", None)
    dtypes = {name: dtype for dtype, name in _NAMES.items()}
    return {
        name: np.frombuffer(blob, dtypes[e["dtype"]], math.prod(e["shape"]), 8 + length + e["data_offsets"][0])
        .reshape(e["shape"])
        .copy()
        for name, e in header.items()
    }


def config(**changes: Any) -> dict[str, Any]:
    """The golden Llama's config.json; a field given as `...` is dropped."""
    values = json.loads((LLAMA / "config.json").read_text()) | changes
    return {name: value for name, value in values.items() if value is not ...}


def copy_checkpoint(source: Path, target: Path, **changes: Any) -> Path:
    """A golden folder without its goldens, its config changed."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("golden.npz"))
    values = json.loads((source / "config.json").read_text()) | changes
    write_json(target / "config.json", {name: value for name, value in values.items() if value is not ...})
    return target


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))
