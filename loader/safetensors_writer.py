"""Writes one safetensors file tensor by tensor, in bfloat16, so that only one tensor is in memory at a time."""

import json
import math
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loader.parameters import Shape
from loader.safetensors import DTYPES

_BFLOAT16 = DTYPES["BF16"]

_ALIGNMENT = 8
"""The header is padded so that the data section starts on a multiple of it, as the format asks of writers."""


def write_bfloat16(path: Path, table: Mapping[str, Shape], tensors: Iterable[NDArray[np.float32]]) -> None:
    """Write `tensors`, given in the order and with the shapes of `table`, rounded to nearest even."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in table.items():
        end = offset + math.prod(shape) * _BFLOAT16.itemsize
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for shape, tensor in zip(table.values(), tensors, strict=True):
            assert tensor.shape == shape
            tensor.astype(_BFLOAT16).tofile(file)
