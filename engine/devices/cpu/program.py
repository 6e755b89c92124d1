"""Programs: a model's forward pass recorded once, replayed every step.

`Recorder` implements the Ops protocol: each call appends an op whose operands are `Value`s. `workspace_nbytes` says
what memory the values need (a value's memory is reused after its last reader), `link` turns ops
into the table that `engine/devices/cpu/kernels/interpreter.py` replays. Recording needs shapes only, so the parent
process can size the workspace before anything is loaded. Column orders are documented at the kernels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.devices.cpu.kernels import constants as opcodes
from engine.devices.cpu.kernels.constants import COLUMNS, GROUP, LANES, ROW_TILE, STRIP_ROWS
from engine.devices.cpu.layout import ALIGNMENT, HEAD_ROWS, PANEL, UNIT_ROWS, KVLayout, int8_row_nbytes, padded
from engine.kv.groups import kv_groups
from loader.decoder import DecoderConfig


@dataclass(frozen=True, slots=True)
class Value:
    """An activation, [rows, width]: float32, or where it feeds a product, as the product takes it."""

    number: int
    width: int
    compute: bool
    rows: int


class Addresses(Protocol):
    """Where everything is that a program names; given at link time."""

    ids: int
    token_rows: int
    positions: int
    items: int
    selected: int
    angles: int
    scratch: int
    scratch_stride: int
    dots: int

    def function(self, code: int) -> int:
        """What does the work of an op."""

    def embedding(self, name: str) -> tuple[int, int]:
        """Address and dtype code of a gathered table."""

    def vector(self, names: Sequence[str]) -> int:
        """Float32 values side by side, zero up to the next 16; 0 for no names."""

    def panels(self, names: Sequence[str], alternating: bool = False) -> tuple[int, int, int]:
        """Panel table of a packed weight, its length, and the parts of a panel; see `Weights.panels`."""

    def pages(self, layer: int) -> list[int]:
        """A layer's keys, values, key scales and value scales."""

    def block_table(self, group: int) -> int: ...


Columns = Callable[[Addresses, Callable[[Value], int]], list[int]]


@dataclass(frozen=True, slots=True)
class Op:
    code: int
    reads: tuple[Value, ...]
    writes: Value
    columns: Columns


@dataclass(slots=True)
class Recorder:
    """Ops that are written down. One recorder holds a body over `max_tokens` rows and a head over HEAD_ROWS.

    Attributes:
        bfloat16: the compute dtype, else float32.
        weights_int8: products take activations rounded to int8; what feeds them stays float32 until then.
        blocks_per_row: length of a row's block table.
    """

    decoder: DecoderConfig
    kv: KVLayout
    bfloat16: bool
    weights_int8: bool
    max_tokens: int
    blocks_per_row: int
    ops: list[Op] = field(default_factory=list)
    _values: list[Value] = field(default_factory=list)
    _fusible: tuple[Value, Value, Sequence[str]] | None = None
    _rows: int = 0

    def __post_init__(self) -> None:
        self._rows = self.max_tokens

    def embedding(self, weight: str) -> Value:
        width = self.decoder.hidden_size
        out = self._value(width)
        self._emit(opcodes.EMBEDDING, (), out, lambda at, buf: [at.ids, *at.embedding(weight), buf(out), width])
        return out

    def select_rows(self, x: Value) -> Value:
        self._rows = HEAD_ROWS
        out = self._value(x.width)
        self._emit(opcodes.SELECT_ROWS, (x,), out, lambda at, buf: [at.selected, buf(x), buf(out), x.width])
        return out

    def rms_norm(self, x: Value, weight: str, eps: float) -> Value:
        out = self._value(x.width, compute=True)
        bits = _float_bits(eps)
        self._emit(
            opcodes.RMS_NORM,
            (x,),
            out,
            lambda at, buf: [buf(x), at.vector([weight]), buf(out), x.width, bits, self._input_code, _int8_stride(out)],
        )
        return out

    def linear(self, x: Value, weights: Sequence[str], biases: Sequence[str] = ()) -> Value:
        out = self._value(sum(self._outputs(name) for name in weights))
        self._fusible = (out, x, weights) if self.weights_int8 and not biases else None
        return self._multiply(x, out, weights, biases, adds=False)

    def add_linear(self, residual: Value, x: Value, weight: str, biases: Sequence[str] = ()) -> Value:
        return self._multiply(x, residual, [weight], biases, adds=True)

    def silu_and_mul(self, gate_up: Value) -> Value:
        out = self._value(gate_up.width // 2, compute=True)
        if self._fusible is not None and self._fusible[0] is gate_up:
            return self._gate_up(out, *self._fusible[1:])
        self._emit(
            opcodes.SILU_AND_MUL,
            (gate_up,),
            out,
            lambda at, buf: [buf(gate_up), buf(out), out.width, self._input_code, _int8_stride(out)],
        )
        return out

    def rope_and_cache(self, qkv: Value, layer: int, norms: Sequence[str] = ()) -> Value:
        config, group = self.decoder, self._group(layer)
        queries = self._value(config.num_attention_heads * padded(config.head_dim))
        scale, eps = _float_bits(config.attention_scale), _float_bits(config.rms_norm_eps)

        def columns(at: Addresses, buf: Callable[[Value], int]) -> list[int]:
            keys, values, *scales = at.pages(layer)
            angles = at.angles if config.rotary_layers[layer] else 0
            places = [buf(qkv), buf(queries), keys, values, angles, at.block_table(group)]
            heads = [config.num_attention_heads, config.num_key_value_heads, config.head_dim]
            tail = [self.kv.block_size, self.blocks_per_row, self._page_code, scale]
            return [*places, at.token_rows, at.positions, *heads, *tail, *scales, *self._strides, at.vector(norms), eps]

        self._emit(opcodes.ROPE_AND_CACHE, (qkv,), queries, columns)
        return queries

    def paged_attention(self, queries: Value, layer: int) -> Value:
        config, group = self.decoder, self._group(layer)
        out = self._value(config.num_attention_heads * config.head_dim, compute=not self.weights_int8)

        def columns(at: Addresses, buf: Callable[[Value], int]) -> list[int]:
            keys, values, *scales = at.pages(layer)
            places = [buf(queries), buf(out), keys, values, at.block_table(group), at.items]
            heads = [config.num_attention_heads, config.num_key_value_heads, config.head_dim]
            table = [self.kv.block_size, self.blocks_per_row, self._page_code, config.layer_windows[layer] or 0]
            tail = [at.scratch, at.scratch_stride, self._input_code == 1, *scales, *self._strides]
            return [*places, *heads, *table, *tail]

        code = opcodes.ATTENTION_BFLOAT16 if self.bfloat16 else opcodes.ATTENTION_FLOAT32
        self._emit(code, (queries,), out, columns)
        return self._quantize(out) if self.weights_int8 else out

    def _gate_up(self, out: Value, x: Value, weights: Sequence[str]) -> Value:
        """Replaces the product of gates and ups, which is the last op, by one that goes on to multiply them."""

        def columns(at: Addresses, buf: Callable[[Value], int]) -> list[int]:
            strides = [_int8_stride(x), _int8_stride(out), at.scratch, at.scratch_stride]
            return [buf(x), buf(out), x.width, out.width, *at.panels(weights, alternating=True), *strides]

        self.ops.pop()
        self._emit(opcodes.GATE_UP_INT8, (x,), out, columns)
        return out

    @property
    def _strides(self) -> tuple[int, int]:
        """Bytes from a block to the next, and from a head to the next."""
        return self.kv.block_nbytes, self.kv.head_nbytes

    @property
    def _page_code(self) -> int:
        """0 for float32 pages, 1 for bfloat16, 2 more for int8 in their place."""
        return 2 * self.kv.is_int8 + self.bfloat16

    @property
    def _input_code(self) -> int:
        """What feeds a product: 0 float32, 1 bfloat16, 2 int8 in groups."""
        return 2 if self.weights_int8 else int(self.bfloat16)

    def _quantize(self, x: Value) -> Value:
        out = self._value(x.width, compute=True)
        self._emit(opcodes.QUANTIZE, (x,), out, lambda at, buf: [buf(x), buf(out), x.width, _int8_stride(out)])
        return out

    def _multiply(self, x: Value, out: Value, weights: Sequence[str], biases: Sequence[str], adds: bool) -> Value:
        reads = (x, out) if adds else (x,)
        if not self.weights_int8:
            self._emit(opcodes.LINEAR, reads, out, self._product(x, out, weights, biases, adds))
            return out

        def columns(at: Addresses, buf: Callable[[Value], int]) -> list[int]:
            shape = [x.width, out.width]
            return [buf(x), buf(out), *shape, *at.panels(weights), at.vector(biases), adds, _int8_stride(x)]

        self._emit(opcodes.LINEAR_INT8, reads, out, columns)
        return out

    def _product(self, x: Value, out: Value, weights: Sequence[str], biases: Sequence[str], adds: bool) -> Columns:
        def columns(at: Addresses, buf: Callable[[Value], int]) -> list[int]:
            shape, flags = [x.width, out.width], [adds, self.bfloat16]
            tail = [at.dots, at.scratch, at.scratch_stride]
            return [buf(x), buf(out), *shape, *at.panels(weights), at.vector(biases), *flags, *tail]

        return columns

    def _outputs(self, weight: str) -> int:
        config, module = self.decoder, weight.rsplit(".", 2)[-2]
        match module:
            case "q_proj":
                return config.num_attention_heads * config.head_dim
            case "k_proj" | "v_proj":
                return config.num_key_value_heads * config.head_dim
            case "gate_proj" | "up_proj":
                return config.intermediate_size
            case "lm_head" | "embed_tokens":
                return config.vocab_size
        raise ValueError(weight)

    def _group(self, layer: int) -> int:
        groups = kv_groups(self.decoder.layer_windows)
        return next(index for index, group in enumerate(groups) if layer in group.layers)

    def _value(self, width: int, compute: bool = False) -> Value:
        self._values.append(Value(len(self._values), width, compute, self._rows))
        return self._values[-1]

    def _emit(self, code: int, reads: tuple[Value, ...], writes: Value, columns: Columns) -> None:
        self.ops.append(Op(code, reads, writes, columns))

    def place(self, keep: Sequence[Value]) -> tuple[list[int], int]:
        """Offset of every value in the workspace, and its size; `keep` outlive the last op.

        A value lives from the op that writes it to the last that reads it; first fit.
        """
        last = {value.number: index for index, op in enumerate(self.ops) for value in (*op.reads, op.writes)}
        last |= {value.number: len(self.ops) for value in keep}
        offsets = [0] * len(self._values)
        live: list[tuple[int, int, int]] = []  # offset, end, last op
        total = 0
        placed: set[int] = set()
        for index, op in enumerate(self.ops):
            if op.writes.number in placed:
                continue
            live = sorted(entry for entry in live if entry[2] >= index)
            offset, nbytes = 0, self._nbytes(op.writes)
            for begin, end, _ in live:
                if offset + nbytes <= begin:
                    break
                offset = max(offset, end)
            offsets[op.writes.number] = offset
            placed.add(op.writes.number)
            live.append((offset, offset + nbytes, last[op.writes.number]))
            total = max(total, offset + nbytes)
        return offsets, total

    def _nbytes(self, value: Value) -> int:
        row = padded(value.width) * 4
        if value.compute:
            row = (row, row // 2, _int8_stride(value))[self._input_code]
        nbytes = value.rows * row + LANES * 4  # a vector may read past the last row
        return -(-nbytes // ALIGNMENT) * ALIGNMENT

    def scratch_nbytes(self) -> int:
        """Per thread: a panel's product, or a unit's queries, outputs, softmax state and a tile's keys and values, or a
        strip of gates and ups."""
        product = min(max(self.max_tokens, HEAD_ROWS), ROW_TILE) * PANEL * (4 if self.bfloat16 else 8)
        group = self.decoder.num_attention_heads // self.decoder.num_key_value_heads
        rows = max(UNIT_ROWS, group) + 4
        width = padded(self.decoder.head_dim)
        attention = 4 * (2 * rows * width + 2 * rows * LANES + 8 * LANES + 8 * LANES * width + 1024)
        return -(-max(product, attention, STRIP_ROWS * 2 * GROUP * 4) // ALIGNMENT) * ALIGNMENT


def link(recorder: Recorder, offsets: Sequence[int], workspace: int, at: Addresses) -> NDArray[np.int64]:
    """The table of all ops, given the workspace's address and everything else's."""
    table = np.zeros((len(recorder.ops), COLUMNS), np.int64)
    for row, op in zip(table, recorder.ops, strict=True):
        columns = op.columns(at, lambda value: workspace + offsets[value.number])
        row[: 1 + len(columns)] = [op.code, *columns]
        row[-1] = at.function(op.code)
    return table


def _int8_stride(value: Value) -> int:
    """Bytes from one row of int8 groups to the next."""
    return padded(int8_row_nbytes(value.width) // 4) * 4


def _float_bits(value: float) -> int:
    return int(np.float64(value).view(np.int64))


def tokens_per_unit(decoder: DecoderConfig) -> int:
    return max(1, UNIT_ROWS // (decoder.num_attention_heads // decoder.num_key_value_heads))
