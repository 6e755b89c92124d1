"""CudaModel: a decoder over the kernels, with the memory it runs in.

    body   embedding ... last layer, over the step's tokens, into the residual stream
    head   norm and vocabulary, over at most `head_rows` selected rows of it

The forward pass is `engine/models/decoder.py`; `_Launching` implements its Ops, each by a launch on the compute stream.
Read next: `engine/devices/cuda/buffers.py`, `engine/devices/cuda/ops/`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from engine.devices.cuda.buffers import allocate, buffer_specs, pool_specs, rotary_rows
from engine.devices.cuda.graphs import Graphs
from engine.devices.cuda.ops import attention, cublas, gemm, kv, layers
from engine.devices.cuda.ops.attention import AttentionPlan, Partials, Ragged, plan_attention
from engine.devices.cuda.ops.gemm import Epilogue
from engine.devices.cuda.ops.kv import Pages
from engine.devices.cuda.parameters import Parameters, is_gate_up, is_head
from engine.devices.cuda.registry import KernelRegistry
from engine.devices.cuda.shape import CudaShape
from engine.devices.cuda.upload import Uploader, row_chunks
from engine.devices.cuda.weights import LinearWeight
from engine.kv.groups import kv_groups
from engine.models.decoder import hidden_states, logits
from engine.plan import Int32Array


@dataclass(frozen=True, slots=True)
class _Layer:
    """Where a layer's keys and values are."""

    pages: Pages
    block_table: Any
    window: int


class CudaModel:
    """Parameters, buffers and pages of one decoder.

    Attributes:
        buffers: activations, tables and the step's tokens, by the names of `buffer_specs`.
        pools: pages of all layers, by the names of `pool_specs`.
    """

    def __init__(
        self, shape: CudaShape, parameters: Parameters, block_tables: Any, registry: KernelRegistry, stream: Any
    ) -> None:
        """block_tables: i32 [groups, rows, blocks per row]."""
        self.shape, self.parameters, self.registry, self.stream = shape, parameters, registry, stream
        self.buffers, self.pools = allocate(buffer_specs(shape)), allocate(pool_specs(shape))
        self._groups = kv_groups(shape.decoder.layer_windows)
        scales = self.pools.scales if shape.kv_int8 else None
        self.layers = {
            layer: _Layer(Pages.of(self.pools.pool, scales, slot), block_tables[index], group.window or 0)
            for index, group in enumerate(self._groups)
            for slot, layer in enumerate(group.layers)
        }
        self.partials = Partials(self.buffers.partial_outputs, self.buffers.partial_softmax)
        self._graphs = Graphs(stream)
        uploader = Uploader(stream)
        for rows in row_chunks(shape.max_model_len, 4 * shape.decoder.head_dim, 1):
            uploader.send(self.buffers.rope[rows], rotary_rows(shape, rows))
        uploader.send(self.buffers.identity, np.arange(len(self.buffers.identity)))
        uploader.finish()

    def body(self, num_tokens: Int32Array, seq_lens: Int32Array, query_start_loc: Any, entry_rows: Any) -> None:
        """Run the layers over the tokens in the buffers: entries of `num_tokens`, ending sequences of `seq_lens`.

        query_start_loc, entry_rows: as in `Ragged`.
        """
        plan = plan_attention(num_tokens, seq_lens, len(self.buffers.partial_outputs))
        if plan.chunks or self._uses_cublas(plan.tokens):  # which cannot be recorded
            ragged = Ragged(query_start_loc, entry_rows, self.buffers.seq_lens)
            hidden_states(_Launching(self, plan.tokens, plan, ragged), self.shape.decoder)
        else:
            self._decode(plan)

    def _uses_cublas(self, tokens: int) -> bool:
        return self.shape.cublas and any(
            cublas.takes(weight, tokens, Epilogue.STORE) for weight in self.parameters.linears.values()
        )

    def _decode(self, plan: AttentionPlan) -> None:
        """Every entry is one token, so that entry i is token i: steps of one kind differ in what buffers hold alone."""
        splits = 1 << (plan.splits - 1).bit_length()
        ragged = Ragged(self.buffers.identity, self.buffers.token_rows, self.buffers.seq_lens)
        ops = _Launching(self, plan.tokens, replace(plan, splits=splits), ragged)
        self._graphs.run((plan.tokens, splits), lambda: hidden_states(ops, self.shape.decoder))

    def head(self, indices: Any, rows: int) -> Any:
        """f32 [head_rows, vocab], of which `rows` are the logits after the step's tokens at `indices`, i32 [rows]."""
        return logits(_Launching(self, rows, indices=indices), self.shape.decoder, self.buffers.residual)

    def copy_blocks(self, group: int, pairs: Any, count: int) -> None:
        """Copy blocks in every layer of a KV group, as if one after another; pairs i32 [count, 2]."""
        slices = 2 * len(self._groups[group].layers)
        for pool in vars(self.pools).values():
            kv.copy_blocks(self.registry, pool[:slices], pairs, count, stream=self.stream)


@dataclass(frozen=True, slots=True)
class _GateUp:
    """A product that waits for its activation, which the same kernel makes."""

    x: Any
    weight: LinearWeight


@dataclass(frozen=True, slots=True)
class _Launching:
    """Ops by launches; a handle is the buffer that an activation is in, of which the first `rows` rows count.

    Attributes:
        plan, ragged: of the body's attention.
        indices: rows that the head selects.
    """

    model: CudaModel
    rows: int
    plan: AttentionPlan | None = None
    ragged: Ragged | None = None
    indices: Any = None

    def embedding(self, weight: str) -> Any:
        model, buffers = self.model, self.model.buffers
        table = model.parameters.tables[weight]
        layers.embedding(model.registry, buffers.ids, table, buffers.residual, self.rows, stream=model.stream)
        return buffers.residual

    def rms_norm(self, x: Any, weight: str, eps: float) -> Any:
        model, buffers = self.model, self.model.buffers
        out = buffers.normed if x is buffers.residual else buffers.selected_normed
        layers.rms_norm(model.registry, x, model.parameters.norms[weight], out, self.rows, eps, stream=model.stream)
        return out

    def linear(self, x: Any, weights: Sequence[str], biases: Sequence[str] = ()) -> Any:
        model, buffers = self.model, self.model.buffers
        if is_head(weights):
            table = LinearWeight(model.parameters.tables[weights[0]], None, None)
            return self._product(x, table, buffers.logits, Epilogue.STORE_F32)
        weight = model.parameters.linears[weights[0]]
        if is_gate_up(weights):
            return _GateUp(x, weight)
        return self._product(x, weight, buffers.qkv, Epilogue.STORE)

    def add_linear(self, residual: Any, x: Any, weight: str, biases: Sequence[str] = ()) -> Any:
        return self._product(x, self.model.parameters.linears[weight], residual, Epilogue.ADD_F32)

    def rope_and_cache(self, qkv: Any, layer: int, norms: Sequence[str] = ()) -> Any:
        model, buffers, place = self.model, self.model.buffers, self.model.layers[layer]
        tokens = (buffers.token_rows, buffers.positions)
        rope = buffers.rope if model.shape.decoder.rotary_layers[layer] else None
        args = (qkv, rope, place.pages, place.block_table, *tokens, buffers.queries, self.rows)
        weights = tuple(model.parameters.norms[name] for name in norms)
        eps = model.shape.decoder.rms_norm_eps
        kv.rope_and_cache(model.registry, *args, norms=weights, eps=eps, stream=model.stream)
        return buffers.queries

    def paged_attention(self, queries: Any, layer: int) -> Any:
        model, place, out = self.model, self.model.layers[layer], self.model.buffers.attended
        assert self.plan is not None and self.ragged is not None
        attention.paged_attention(
            model.registry,
            queries,
            place.pages,
            place.block_table,
            self.ragged,
            self.plan,
            model.partials,
            out,
            scale=model.shape.decoder.attention_scale,
            window=place.window,
            stream=model.stream,
        )
        return out

    def silu_and_mul(self, gate_up: _GateUp) -> Any:
        model, buffers, out = self.model, self.model.buffers, self.model.buffers.activated
        if not self._cublas_takes(gate_up.weight, Epilogue.STORE):
            return self._product(gate_up.x, gate_up.weight, out, Epilogue.SWIGLU)
        both = self._product(gate_up.x, gate_up.weight, buffers.gate_up, Epilogue.STORE)
        layers.silu_and_mul(model.registry, both, out, self.rows, interleaved=True, stream=model.stream)
        return out

    def select_rows(self, x: Any) -> Any:
        model, out = self.model, self.model.buffers.selected
        layers.select_rows(model.registry, self.indices, x, out, self.rows, stream=model.stream)
        return out

    def _product(self, x: Any, weight: LinearWeight, out: Any, epilogue: Epilogue) -> Any:
        model = self.model
        if self._cublas_takes(weight, epilogue):
            cublas.linear(x, weight, out, self.rows, epilogue, stream=model.stream)
        else:
            gemm.linear(model.registry, x, weight, out, self.rows, epilogue, stream=model.stream)
        return out

    def _cublas_takes(self, weight: LinearWeight, epilogue: Epilogue) -> bool:
        return self.model.shape.cublas and cublas.takes(weight, self.rows, epilogue)
