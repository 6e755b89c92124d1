"""The function of each op, by its code."""

from engine.devices.cpu.kernels import constants
from engine.devices.cpu.kernels.attention_bfloat16 import attention_bfloat16_parts
from engine.devices.cpu.kernels.attention_float32 import attention_float32_parts
from engine.devices.cpu.kernels.gated import silu_and_mul_parts
from engine.devices.cpu.kernels.jit import entry
from engine.devices.cpu.kernels.linear import linear_parts
from engine.devices.cpu.kernels.linear_int8 import gate_up_int8_parts, linear_int8_parts, quantize_parts
from engine.devices.cpu.kernels.ops import embedding_parts, rms_norm_parts, select_rows_parts
from engine.devices.cpu.kernels.rope import rope_and_cache_parts

ENTRIES: dict[int, entry] = {
    constants.EMBEDDING: embedding_parts,
    constants.SELECT_ROWS: select_rows_parts,
    constants.RMS_NORM: rms_norm_parts,
    constants.LINEAR: linear_parts,
    constants.SILU_AND_MUL: silu_and_mul_parts,
    constants.ROPE_AND_CACHE: rope_and_cache_parts,
    constants.ATTENTION_FLOAT32: attention_float32_parts,
    constants.ATTENTION_BFLOAT16: attention_bfloat16_parts,
    constants.QUANTIZE: quantize_parts,
    constants.LINEAR_INT8: linear_int8_parts,
    constants.GATE_UP_INT8: gate_up_int8_parts,
}
