"""What each opcode means: one handler per opcode, which turns an instruction into a C++ statement.

A handler must take every modifier that it understands; one left over is an error, as is an opcode without handler.
Families: arithmetic.py, convert.py, memory.py, control.py, warp.py, tensor.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.gpu_without_gpu.opcodes import arithmetic, control, convert, memory, tensor, warp
from tests.gpu_without_gpu.opcodes.registry import HANDLERS, Modifiers

if TYPE_CHECKING:
    from tests.gpu_without_gpu.ptx import Instruction
    from tests.gpu_without_gpu.translate import FunctionWriter

__all__ = ["arithmetic", "control", "convert", "memory", "tensor", "warp", "write"]


def write(w: FunctionWriter, ins: Instruction) -> str:
    """The C++ of one instruction. Raises PtxError."""
    handler = HANDLERS.get(ins.opcode)
    if handler is None:
        raise w.error("unknown opcode")
    modifiers = Modifiers(w, ins)
    code = handler(w, ins, modifiers)
    modifiers.finish()
    return code
