"""Buffers: activations and tables on the GPU, sized once for the largest step.

One table of shapes and dtypes says what there is; the memory ledger adds it up, the model allocates it.
"""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np

from engine.devices.cuda.ops.attention import max_partials
from engine.devices.cuda.shape import CudaShape
from engine.errors import DeviceFault
from loader.rope import inverse_frequencies

Spec = tuple[tuple[int, ...], np.dtype[Any]]


def buffer_specs(shape: CudaShape) -> dict[str, Spec]:
    """Name to shape and dtype.

    residual: the residual stream. normed, qkv, queries, attended, gate_up, activated: the steps of a layer in its
    order; gate_up is cuBLAS's, other products make the activation themselves.
    partial_outputs, partial_softmax: of splits of keys. selected, selected_normed, logits, changed: of rows whose
    logits are wanted, a tile at a time. ids, token_rows, positions: of tokens. seq_lens: of entries.
    rope: cosines, then sines. identity: 0, 1, 2 ...
    """
    decoder, tokens, rows = shape.decoder, shape.max_num_batched_tokens, shape.head_rows
    heads, kv_heads, size = decoder.num_attention_heads, decoder.num_key_value_heads, decoder.head_dim
    partials = max_partials(shape.max_num_seqs, shape.max_model_len)
    element, single, integer = shape.numpy_dtype, np.dtype(np.float32), np.dtype(np.int32)
    return {
        "residual": ((tokens, decoder.hidden_size), single),
        "normed": ((tokens, decoder.hidden_size), element),
        "qkv": ((tokens, (heads + 2 * kv_heads) * size), element),
        "queries": ((tokens, heads * size), element),
        "attended": ((tokens, heads * size), element),
        **({"gate_up": ((tokens, 2 * decoder.intermediate_size), element)} if shape.cublas else {}),
        "activated": ((tokens, decoder.intermediate_size), element),
        "partial_outputs": ((partials, heads, size), single),
        "partial_softmax": ((partials, heads, 2), single),
        "selected": ((rows, decoder.hidden_size), single),
        "selected_normed": ((rows, decoder.hidden_size), element),
        "logits": ((rows, decoder.vocab_size), single),
        "changed": ((rows, decoder.vocab_size), single),
        "ids": ((tokens,), integer),
        "token_rows": ((tokens,), integer),
        "positions": ((tokens,), integer),
        "seq_lens": ((shape.max_num_seqs,), integer),
        "rope": ((shape.max_model_len, size), single),
        "identity": ((max(rows, shape.max_num_seqs + 1),), integer),
    }


def pool_specs(shape: CudaShape) -> dict[str, Spec]:
    """Pages of all layers, keys and values of each slot in turn, and for int8 their scales: `ops/kv.py`."""
    kv_heads, size = shape.decoder.num_key_value_heads, shape.decoder.head_dim
    places = (2 * shape.page_slots, shape.num_blocks, kv_heads, shape.block_size)
    if not shape.kv_int8:
        return {"pool": ((*places, size), shape.numpy_dtype)}
    return {"pool": ((*places, size), np.dtype(np.int8)), "scales": (places, np.dtype(np.float32))}


def allocate(specs: dict[str, Spec]) -> SimpleNamespace:
    """A CuPy array for each, uninitialised. Raises DeviceFault when there is no room."""
    import cupy

    try:
        return SimpleNamespace(**{name: cupy.empty(dims, dtype) for name, (dims, dtype) in specs.items()})
    except cupy.cuda.memory.OutOfMemoryError as error:
        raise out_of_memory(error) from error


def out_of_memory(error: Exception) -> DeviceFault:
    return DeviceFault(
        f"the GPU is out of memory ({error}); lower gpu_memory_utilization, max_num_batched_tokens or max_model_len, "
        "or stop what else uses the GPU"
    )


def specs_nbytes(specs: dict[str, Spec]) -> int:
    return sum(math.prod(dims) * dtype.itemsize for dims, dtype in specs.values())


def rotary_rows(shape: CudaShape, rows: slice) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """[positions, head_dim] cosines and sines of float64 angles, times the attention factor."""
    rope = shape.decoder.rope
    angles = np.arange(rows.start, rows.stop)[:, None] * inverse_frequencies(rope, shape.decoder.head_dim)
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * rope.attention_factor
    return table.astype(np.float32)
