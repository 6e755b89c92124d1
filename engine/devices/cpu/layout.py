"""How the cpu device lays out memory: lane padding, pages, panels. Constants and arithmetic, no Numba."""

import math
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from engine.devices.cpu.kernels.constants import GROUP, LANES
from engine.kv.groups import kv_groups
from loader.decoder import DecoderConfig

PANEL = 512
"""Most columns per packed panel: wider than 768, NumKong falls to 150 GFLOP/s at 512 rows."""

HEAD_ROWS = 32
"""Rows per product with the vocabulary: bounds the logits, reaches two thirds of the speed of 512 rows."""

UNIT_ROWS = 48
"""Query rows per unit of attention work: amortises a page over them, leaves enough units to share out."""

ALIGNMENT = 64


def padded(width: int) -> int:
    return -(-width // LANES) * LANES


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Where pages lie in the pool.

    A block id is good in any group: a block holds a layer of each group at the layer's place there, `slots` of them,
    and of a layer, head by head, keys [head_dim, slots], then values [slots, head_dim]; of bfloat16, keys
    [head_dim / 2, slots, 2] and values [slots / 2, head_dim, 2]. head_dim and the slots of keys are padded to lanes,
    the slots of values to an even number. Of int8, whose itemsize is 1, float32 scales of keys, then of values
    follow, each [slots] padded to lanes. What a query head reads of 16 tokens is thus one run, 4 KiB at head_dim 64.
    """

    num_blocks: int
    block_size: int
    kv_heads: int
    head_dim: int
    itemsize: int
    slots: int

    @property
    def is_int8(self) -> bool:
        return self.itemsize == 1

    @property
    def parts(self) -> tuple[int, int, int, int]:
        """Bytes of a head's keys, values, key scales and value scales in one block; without int8 scales take none."""
        width, scales = padded(self.head_dim) * self.itemsize, padded(self.block_size) * 4 * self.is_int8
        return padded(self.block_size) * width, (self.block_size + self.block_size % 2) * width, scales, scales

    @property
    def head_nbytes(self) -> int:
        return sum(self.parts)

    @property
    def layer_nbytes(self) -> int:
        return self.kv_heads * self.head_nbytes

    @property
    def block_nbytes(self) -> int:
        """Memory per block id."""
        return self.slots * self.layer_nbytes

    @property
    def nbytes(self) -> int:
        return self.num_blocks * self.block_nbytes

    def pages(self, slot: int) -> list[int]:
        """Where the first head's keys, values, key scales and value scales of a layer begin in a block."""
        return [slot * self.layer_nbytes + first for first in accumulate(self.parts[:-1], initial=0)]


def kv_layout(decoder: DecoderConfig, itemsize: int, num_blocks: int, block_size: int) -> KVLayout:
    slots = max(len(group.layers) for group in kv_groups(decoder.layer_windows))
    return KVLayout(num_blocks, block_size, decoder.num_key_value_heads, decoder.head_dim, itemsize, slots)


def panel_widths(n: int, threads: int, unit: int) -> list[int]:
    """Split n columns into about equally many panels per thread, each but the last a multiple of `unit`."""
    panels = threads * math.ceil(n / (threads * PANEL))
    width = -(-math.ceil(n / panels) // unit) * unit
    return [min(width, n - first) for first in range(0, n, width)]


def int8_row_nbytes(k: int) -> int:
    """An activation row of k inputs rounded to int8 in groups, with a scale and a correction for each."""
    return -(-k // GROUP) * (GROUP + 8)


def aligned_bytes(nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Uninitialised bytes on an ALIGNMENT boundary; large ones take memory only when touched."""
    raw = np.empty(nbytes + 2 * ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes]
