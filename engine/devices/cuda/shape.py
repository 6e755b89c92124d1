"""CudaShape: the limits that memory on the GPU is laid out for, and the arithmetic that follows from them."""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from engine.config import EngineConfig
from engine.devices.cuda.ops import cublas
from engine.errors import ConfigError
from engine.kv.groups import kv_groups
from loader.decoder import DecoderConfig

HEAD_ROWS = 64
"""Rows per product with the vocabulary: bounds the logits to 64 x vocabulary x 4 bytes."""


TOKEN_BUDGET = 512
"""Of a step where none is given: what was run on an H200; others were not tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaShape:
    """Limits of one model.

    Attributes:
        dtype: of matrix inputs and, unless `kv_int8`, of keys and values: "bfloat16" or "float16".
        kv_int8: keys and values are int8 with a float32 scale per token and KV head.
        weight_int8: linear layers are int8 with a float32 scale per output channel.
        cublas: products of many rows may go to cuBLAS.
    """

    decoder: DecoderConfig
    dtype: str
    kv_int8: bool
    weight_int8: bool
    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    cublas: bool = False

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return np.dtype(ml_dtypes.bfloat16 if self.dtype == "bfloat16" else np.float16)

    @property
    def blocks_per_row(self) -> int:
        return -(-self.max_model_len // self.block_size)

    @property
    def num_groups(self) -> int:
        return len(kv_groups(self.decoder.layer_windows))

    @property
    def page_slots(self) -> int:
        """Layers that have pages of their own: a block id is good in any group, so groups share page arrays."""
        return max(len(group.layers) for group in kv_groups(self.decoder.layer_windows))

    @property
    def head_rows(self) -> int:
        return min(HEAD_ROWS, max(self.max_num_seqs, 8))

    @property
    def block_nbytes(self) -> int:
        """Keys, values and scales of one block in every layer."""
        item = 1 if self.kv_int8 else self.numpy_dtype.itemsize
        head = self.decoder.head_dim * item + (4 if self.kv_int8 else 0)
        return 2 * self.page_slots * self.decoder.num_key_value_heads * self.block_size * head


def cuda_shape(config: EngineConfig, decoder: DecoderConfig, *, num_blocks: int, max_model_len: int) -> CudaShape:
    """Raises ConfigError, listing everything about the model that the kernels cannot do."""
    problems = []
    if config.dtype == "float32":
        problems.append("dtype: the cuda device computes in bfloat16 or float16, float32 needs --device cpu")
    for name, multiple in (("head_dim", 4), ("intermediate_size", 8)):
        if getattr(decoder, name) % multiple:
            problems.append(f"{name}: {getattr(decoder, name)} is not a multiple of {multiple}, as the kernels need")
    if problems:
        raise ConfigError("; ".join(problems))
    return CudaShape(
        decoder=decoder,
        dtype="bfloat16" if config.dtype == "auto" else config.dtype,
        kv_int8=config.kv_cache_dtype == "int8",
        weight_int8=config.quantization == "int8",
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.token_budget,
        cublas=not config.batch_invariant and cublas.missing() is None,
    )
