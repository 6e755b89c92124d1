"""Tensor cores: ldmatrix and mma.sync. Fragment layouts: runtime/tensor.cpp."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.gpu_without_gpu.opcodes.registry import Modifiers, opcode

if TYPE_CHECKING:
    from tests.gpu_without_gpu.ptx import Instruction, Operand
    from tests.gpu_without_gpu.translate import FunctionWriter


def array(w: FunctionWriter, name: str, operand: Operand, t: str) -> str:
    values = [w.read(item, t) for item in w.items(operand)]
    return f"{t} {name}[] = {{{', '.join(values)}}};"


@opcode("ldmatrix")
def load_matrix(w: FunctionWriter, ins: Instruction, m: Modifiers) -> str:
    m.require("sync")
    m.require("aligned")
    m.require("m8n8")
    count = int(m.require("x1", "x2", "x4")[1])
    transpose = "true" if m.flag("trans") else "false"
    m.require("shared", "shared::cta")
    m.require("b16")
    stores = [w.write_to(item, "u32", f"f[{i}]") for i, item in enumerate(w.items(ins.operands[0]))]
    if len(stores) != count:
        raise w.error("the number of registers is not that of matrices")
    call = f"ldmatrix(t, f, {w.address(ins.operands[1])}, {count}, {transpose}, {w.site()});"
    return f"{{ u32 f[4]; {call} {' '.join(stores)} }}"


@opcode("mma")
def matrix_multiply(w: FunctionWriter, ins: Instruction, m: Modifiers) -> str:
    m.require("sync")
    m.require("aligned")
    shape = m.require("m16n8k16", "m16n8k32")
    m.require("row")
    m.require("col")
    c, b, a, d = m.type(), m.type(), m.type(), m.type()
    integer = a in ("s8", "u8")
    accumulator = "s32" if integer else "f32"
    known = (a in ("f16", "bf16") and a == b) if shape == "m16n8k16" else (integer and b in ("s8", "u8"))
    if not known or c != accumulator or d != accumulator:
        raise w.error("unknown types of mma")
    counts = [len(w.items(operand)) for operand in ins.operands]
    if counts != [4, 4, 2, 4]:
        raise w.error("mma takes 4, 4, 2 and 4 registers")
    arrays = [
        array(w, name, operand, t)
        for name, operand, t in zip("abc", ins.operands[1:], ("u32", "u32", accumulator), strict=True)
    ]
    types = f"Element::{a}, Element::{b}" if integer else f"Element::{a}"
    call = f"{accumulator} d[4]; mma_{shape}(t, {types}, d, a, b, c, {w.site()});"
    stores = [w.write_to(item, accumulator, f"d[{i}]") for i, item in enumerate(w.items(ins.operands[0]))]
    return f"{{ {' '.join(arrays)} {call} {' '.join(stores)} }}"
