"""CpuModel: a decoder recorded, linked to its memory, ready to replay.

Everything a program's addresses point to lives here for as long as the model does: packed weights, workspace, pages,
the step's input arrays. `record` needs shapes only and tells the parent process how much memory that will be.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.devices.cpu.layout import HEAD_ROWS, KVLayout, aligned_bytes, kv_layout, padded
from engine.devices.cpu.program import Recorder, Value, link
from engine.devices.cpu.rows import Rows
from engine.devices.cpu.weights import Weights
from engine.kv.groups import kv_groups
from engine.models.decoder import hidden_states, logits
from engine.plan import BlockCopy
from loader.decoder import DecoderConfig
from loader.rope import inverse_frequencies


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The limits that a model's memory is laid out for."""

    decoder: DecoderConfig
    dtype: str
    kv_int8: bool = False
    weights_int8: bool = False
    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    threads: int

    @property
    def blocks_per_row(self) -> int:
        return -(-self.max_model_len // self.block_size)

    @property
    def kv(self) -> KVLayout:
        itemsize = 1 if self.kv_int8 else 2 if self.dtype == "bfloat16" else 4
        return kv_layout(self.decoder, itemsize, self.num_blocks, self.block_size)


@dataclass(frozen=True, slots=True)
class Recording:
    """A model's ops with its memory placed.

    Attributes:
        body: number of ops that run over all tokens; the rest are the head.
        offsets: of every value in the workspace.
        workspace: bytes of all values.
    """

    recorder: Recorder
    body: int
    logits: Value
    offsets: list[int]
    workspace: int


def record(shape: ModelShape) -> Recording:
    recorder = Recorder(
        shape.decoder,
        shape.kv,
        shape.dtype == "bfloat16",
        shape.weights_int8,
        shape.max_num_batched_tokens,
        shape.blocks_per_row,
    )
    hidden = hidden_states(recorder, shape.decoder)
    body = len(recorder.ops)
    out = logits(recorder, shape.decoder, hidden)
    offsets, workspace = recorder.place(keep=[hidden, out])
    return Recording(recorder, body, out, offsets, workspace)


def workspace_nbytes(shape: ModelShape) -> int:
    """Memory beside weights and KV blocks: activations, scratch, rotary angles, block tables."""
    recording = record(shape)
    angles = shape.max_model_len * shape.decoder.head_dim * 4
    tables = len(kv_groups(shape.decoder.layer_windows)) * shape.max_num_seqs * shape.blocks_per_row * 4
    scratch = shape.threads * (recording.recorder.scratch_nbytes() + 24 * padded(shape.decoder.vocab_size))
    return recording.workspace + scratch + angles + tables


def rotary_table(decoder: DecoderConfig, max_model_len: int) -> NDArray[np.float32]:
    """[positions, 2, head_dim / 2]: cosines and sines of float64 angles, times the attention factor."""
    speeds = inverse_frequencies(decoder.rope, decoder.head_dim)
    table = np.empty((max_model_len, 2, len(speeds)), np.float32)
    for first in range(0, max_model_len, 4096):  # bounds the float64 temporaries
        angles = np.arange(first, min(first + 4096, max_model_len))[:, None] * speeds
        table[first : first + 4096, 0] = np.cos(angles) * decoder.rope.attention_factor
        table[first : first + 4096, 1] = np.sin(angles) * decoder.rope.attention_factor
    return table


class CpuModel:
    """A program and the memory it runs in.

    Attributes:
        body, head: tables for the interpreter.
        token_ids, token_rows, positions: [max_num_batched_tokens] int32, the step's tokens.
        items: [max_num_batched_tokens, 4] int32, the step's attention items.
        selected: [HEAD_ROWS] int32, rows of the body's output that the head reads.
        logits: [HEAD_ROWS, vocabulary padded to lanes] float32, the head's output.
        pool: the KV pages, uint8.
    """

    def __init__(self, shape: ModelShape, weights: Weights, rows: Rows) -> None:
        recording = record(shape)
        recorder, tokens = recording.recorder, shape.max_num_batched_tokens
        self.token_ids = np.zeros(tokens, np.int32)
        self.token_rows = np.zeros(tokens, np.int32)
        self.positions = np.zeros(tokens, np.int32)
        self.items = np.zeros((tokens, 4), np.int32)
        self.selected = np.zeros(HEAD_ROWS, np.int32)
        self.pool = aligned_bytes(shape.kv.nbytes)
        self._workspace = aligned_bytes(recording.workspace)
        self._angles = rotary_table(shape.decoder, shape.max_model_len)
        self._scratch = aligned_bytes(shape.threads * recorder.scratch_nbytes())
        self._kept = (weights, rows)
        self._kv, self._groups = shape.kv, kv_groups(shape.decoder.layer_windows)
        table = link(recorder, recording.offsets, _address(self._workspace), _Placement(self, shape, weights, rows))
        self.body, self.head = table[: recording.body], table[recording.body :]
        width, offset = padded(recording.logits.width), recording.offsets[recording.logits.number]
        nbytes = HEAD_ROWS * width * 4
        self.logits = self._workspace[offset : offset + nbytes].view(np.float32).reshape(HEAD_ROWS, width)

    def copy_block(self, copy: BlockCopy) -> None:
        """Copy a block's pages in every layer of its group. Raises ValueError for a block that does not exist."""
        kv = self._kv
        if not (0 <= copy.source < kv.num_blocks and 0 <= copy.target < kv.num_blocks):
            raise ValueError(f"{copy}: blocks are outside [0, {kv.num_blocks})")
        blocks = self.pool.reshape(kv.num_blocks, -1)
        nbytes = len(self._groups[copy.group].layers) * kv.layer_nbytes
        blocks[copy.target, :nbytes] = blocks[copy.source, :nbytes]


class _Placement:
    """`Addresses` of a model."""

    def __init__(self, model: CpuModel, shape: ModelShape, weights: Weights, rows: Rows) -> None:
        self.ids = _address(model.token_ids)
        self.token_rows = _address(model.token_rows)
        self.positions = _address(model.positions)
        self.items = _address(model.items)
        self.selected = _address(model.selected)
        self.angles = _address(model._angles)
        self.scratch = _address(model._scratch)
        self.scratch_stride = model._scratch.nbytes // shape.threads
        self.dots = weights.product.dots_address
        self.embedding, self.vector, self.panels = weights.embedding, weights.vector, weights.panels
        self._pool, self._kv, self._rows = _address(model.pool), shape.kv, rows
        self._slots = {
            layer: slot for g in kv_groups(shape.decoder.layer_windows) for slot, layer in enumerate(g.layers)
        }

    def function(self, code: int) -> int:
        from engine.devices.cpu.kernels.entries import ENTRIES  # Numba: not for the parent, which only sizes a model

        return ENTRIES[code].address

    def pages(self, layer: int) -> list[int]:
        return [self._pool + first for first in self._kv.pages(self._slots[layer])]

    def block_table(self, group: int) -> int:
        return _address(self._rows.block_tables[group])


def _address(array: NDArray[Any]) -> int:
    return int(array.ctypes.data)
