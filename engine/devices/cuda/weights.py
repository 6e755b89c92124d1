"""Weights as the kernels read them: fused where one product serves several, in the compute dtype or int8.

    memory map -> rows of the fused weight -> pinned chunk (converted) -> GPU

Gates and ups of an MLP are interleaved in groups of 8 rows, so that the product that makes a gate makes its up in
the same tile. int8 is per output channel: scale = max|w| / 127, values rounded to nearest even.
Read next: `engine/devices/cuda/upload.py`; `cuda_src/gemm/`, which reads them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.devices.cuda.shape import CudaShape
from engine.devices.cuda.upload import Uploader, row_chunks
from loader.parameters import parameter_table
from loader.weights import WeightSource

GATE_UP_GROUP = 8
"""Rows of gates, then as many of ups, and so on."""

Rows = Callable[[slice], NDArray[Any]]


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """One product's right side.

    Attributes:
        values: [outputs, inputs], compute dtype or int8.
        scales: [outputs] float32 of int8 values, else None.
        bias: [outputs] float32 or None.
    """

    values: Any
    scales: Any
    bias: Any


class Weights:
    """Loads what it is asked for; everything has arrived after `finish`."""

    def __init__(
        self,
        source: WeightSource,
        shape: CudaShape,
        stream: Any,
        advance: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        """`advance` is told the bytes of every tensor done."""
        self._source, self._shape, self._advance = source, shape, advance
        self._uploader = Uploader(stream)

    def finish(self) -> None:
        self._uploader.finish()

    def table(self, name: str) -> Any:
        """A tensor in the compute dtype, as it is: embedding and head."""
        tensor = self._source.tensor(name)
        target = self._empty(tensor.shape, self._shape.numpy_dtype)
        self._send_rows(target, lambda rows: tensor[rows], 1)
        self._advance(tensor.nbytes)
        return target

    def vector(self, names: Sequence[str], interleaved: bool = False) -> Any:
        """1-D tensors as one of float32; None for no names."""
        if not names:
            return None
        parts = [self._source.tensor(name) for name in names]
        values = _fused(parts, interleaved)(slice(0, sum(map(len, parts))))
        target = self._empty(values.shape, np.dtype(np.float32))
        self._uploader.send(target, values)
        self._advance(sum(part.nbytes for part in parts))
        return target

    def linear(self, names: Sequence[str], biases: Sequence[str], interleaved: bool = False) -> LinearWeight:
        """Weights as one, outputs side by side, or two of them interleaved."""
        parts = [self._source.tensor(name) for name in names]
        outputs, inputs = sum(map(len, parts)), parts[0].shape[1]
        rows, multiple = _fused(parts, interleaved), 2 * GATE_UP_GROUP if interleaved else 1
        scales = None
        if self._shape.weight_int8:
            values = self._empty((outputs, inputs), np.dtype(np.int8))
            scales = self._empty((outputs,), np.dtype(np.float32))
            for chunk in row_chunks(outputs, 4 * inputs, multiple):
                quantized, scale = quantize_rows(rows(chunk))
                self._uploader.send(values[chunk], quantized)
                self._uploader.send(scales[chunk], scale)
        else:
            values = self._empty((outputs, inputs), self._shape.numpy_dtype)
            self._send_rows(values, rows, multiple)
        self._advance(sum(part.nbytes for part in parts))
        return LinearWeight(values, scales, self.vector(biases, interleaved))

    def _send_rows(self, target: Any, rows: Rows, multiple: int) -> None:
        for chunk in row_chunks(len(target), target.nbytes // len(target), multiple):
            self._uploader.send(target[chunk], rows(chunk))

    def _empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        import cupy

        return cupy.empty(shape, dtype)


def _fused(parts: Sequence[NDArray[Any]], interleaved: bool) -> Rows:
    """Rows of the parts one after the other, or of two interleaved in groups."""
    if interleaved:
        gate, up = parts

        def pairs(rows: slice) -> NDArray[Any]:
            half = slice(rows.start // 2, rows.stop // 2)
            groups = [part[half].reshape(-1, GATE_UP_GROUP, *part.shape[1:]) for part in (gate, up)]
            return np.stack(groups, axis=1).reshape(-1, *gate.shape[1:])

        return pairs
    firsts = np.cumsum([0, *map(len, parts)])

    def concatenated(rows: slice) -> NDArray[Any]:
        spans = zip(parts, firsts.tolist(), strict=False)
        cut = [part[max(rows.start - first, 0) : max(rows.stop - first, 0)] for part, first in spans]
        return np.concatenate(cut)

    return concatenated


def quantize_rows(weight: NDArray[Any]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """int8 values and float32 scale of each row; a row of zeros has scale 0."""
    single = weight.astype(np.float32)
    scales = np.abs(single).max(axis=1) / np.float32(127)
    divisors = np.where(scales > 0, scales, np.float32(1))
    return np.rint(single / divisors[:, None]).astype(np.int8), scales


def weights_nbytes(shape: CudaShape) -> int:
    """GPU memory that all parameters take."""
    total = 0
    for name, dims in parameter_table(shape.decoder).items():
        if len(dims) == 1:
            total += 4 * dims[0]
        elif name.endswith("_proj.weight") and shape.weight_int8:
            total += dims[0] * (dims[1] + 4)
        else:
            total += math.prod(dims) * shape.numpy_dtype.itemsize
    return total
