"""Which kernels there are: all that the families' tables list, or those that one model may launch."""

from collections.abc import Iterator
from itertools import product

import ml_dtypes
import numpy as np

from engine.devices.cuda.ops import attention, gemm, kv, layers, sampling
from engine.devices.cuda.ops.gemm import Epilogue
from engine.devices.cuda.registry import Variant
from engine.devices.cuda.shape import CudaShape
from loader.decoder import DecoderConfig

HEAD_DIMS = (64, 80, 96, 128, 256)
BLOCK_SIZES = (16,)
"""Head and block sizes that `engine compile` makes kernels for when no model is named."""


def model_variants(shape: CudaShape) -> set[Variant]:
    """All that a model may launch within its limits."""
    decoder, dtype = shape.decoder, shape.numpy_dtype
    pages = (dtype, decoder.head_dim, shape.block_size, shape.kv_int8)
    return {
        *attention.variants(*pages),
        *kv.variants(*pages, decoder.qk_norm),
        *gemm.variants(dtype, _products(decoder, shape.weight_int8)),
        *layers.variants(dtype, [decoder.hidden_size]),
        *sampling.variants(),
    }


def _products(decoder: DecoderConfig, int8: bool) -> Iterator[tuple[int, Epilogue, bool, bool]]:
    attended = decoder.num_attention_heads * decoder.head_dim
    yield decoder.hidden_size, Epilogue.STORE, decoder.attention_bias, int8
    yield attended, Epilogue.ADD_F32, decoder.attention_output_bias, int8
    yield decoder.hidden_size, Epilogue.SWIGLU, decoder.mlp_bias, int8
    yield decoder.intermediate_size, Epilogue.ADD_F32, decoder.mlp_bias, int8
    yield decoder.hidden_size, Epilogue.STORE_F32, False, False


def all_variants() -> set[Variant]:
    """All that the tables list, for both element types, of the head and block sizes above."""
    dtypes = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16))
    pages = [*product(dtypes, HEAD_DIMS, BLOCK_SIZES, (False, True))]
    paged = {variant for shape in pages for variant in attention.variants(*shape)}
    paged |= {variant for shape in pages for qk_norm in (False, True) for variant in kv.variants(*shape, qk_norm)}
    return {*paged, *gemm.all_variants(), *layers.all_variants(), *sampling.variants()}
