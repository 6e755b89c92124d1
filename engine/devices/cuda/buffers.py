"""Buffers: activations and tables on the GPU, sized once for the largest step.

One table of shapes and dtypes says what there is; the memory ledger adds it up, the model allocates it.
"""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np

from engine.devices.cuda.shape import CudaShape
from loader.rope import inverse_frequencies

Spec = tuple[tuple[int, ...], np.dtype[Any]]


def buffer_specs(shape: CudaShape) -> dict[str, Spec]:
    """Name to shape and dtype.

    residual: the residual stream. normed, qkv, queries, attended, activated: the steps of a layer in its order.
    selected, selected_normed, logits: of the rows whose logits are wanted, a tile at a time.
    rope: cosines, then sines. The rest is the ragged batch (`engine/devices/cuda/ops/inputs.py`).
    """
    decoder, tokens, rows = shape.decoder, shape.max_num_batched_tokens, shape.max_num_seqs
    heads, kv_heads, size = decoder.num_attention_heads, decoder.num_key_value_heads, decoder.head_dim
    element, single, integer = shape.numpy_dtype, np.dtype(np.float32), np.dtype(np.int32)
    return {
        "residual": ((tokens, decoder.hidden_size), single),
        "normed": ((tokens, decoder.hidden_size), element),
        "qkv": ((tokens, (heads + 2 * kv_heads) * size), element),
        "queries": ((tokens, heads * size), element),
        "attended": ((tokens, heads * size), element),
        "activated": ((tokens, decoder.intermediate_size), element),
        "selected": ((shape.head_rows, decoder.hidden_size), single),
        "selected_normed": ((shape.head_rows, decoder.hidden_size), element),
        "logits": ((shape.head_rows, decoder.vocab_size), single),
        "rope": ((shape.max_model_len, size), single),
        "ids": ((tokens,), integer),
        "token_rows": ((tokens,), integer),
        "positions": ((tokens,), integer),
        "query_start_loc": ((rows + 1,), integer),
        "entry_rows": ((rows,), integer),
        "seq_lens": ((rows,), integer),
    }


def allocate(specs: dict[str, Spec]) -> SimpleNamespace:
    """A CuPy array for each, uninitialised."""
    import cupy

    return SimpleNamespace(**{name: cupy.empty(dims, dtype) for name, (dims, dtype) in specs.items()})


def nbytes(specs: dict[str, Spec]) -> int:
    return sum(math.prod(dims) * dtype.itemsize for dims, dtype in specs.values())


def rotary_rows(shape: CudaShape, rows: slice) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """[positions, head_dim] cosines and sines of float64 angles, times the attention factor."""
    rope = shape.decoder.rope
    angles = np.arange(rows.start, rows.stop)[:, None] * inverse_frequencies(rope, shape.decoder.head_dim)
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * rope.attention_factor
    return table.astype(np.float32)
