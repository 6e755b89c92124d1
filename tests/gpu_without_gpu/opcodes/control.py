"""Branches, calls, barriers of a block, and the rest of control flow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.gpu_without_gpu.opcodes.registry import Modifiers, opcode
from tests.gpu_without_gpu.ptx import Operand, Symbol, Tuple, identifier

if TYPE_CHECKING:
    from tests.gpu_without_gpu.ptx import Instruction
    from tests.gpu_without_gpu.translate import FunctionWriter


def symbol(w: FunctionWriter, operand: Operand) -> str:
    if not isinstance(operand, Symbol):
        raise w.error("expected a name")
    return operand.name


@opcode("bra")
def branch(w: FunctionWriter, ins: Instruction, m: Modifiers) -> str:
    m.flag("uni")
    return f"goto L_{identifier(symbol(w, ins.operands[0]))};"


@opcode("brx")
def indexed_branch(w: FunctionWriter, ins: Instruction, m: Modifiers) -> str:
    m.require("idx")
    m.flag("uni")
    labels = w.targets[symbol(w, ins.operands[1])]
    cases = " ".join(f"case {i}: goto L_{identifier(label)};" for i, label in enumerate(labels))
    return f'switch ({w.read(ins.operands[0], "u32")}) {{ {cases} default: trap(t, "brx.idx", {w.site()}); }}'


@opcode("ret", "exit")
def leave(w: FunctionWriter, ins: Instruction, m: Modifiers) -> str:
    m.flag("uni")
    if ins.opcode == "exit" and not w.function.is_entry:
        raise w.error("exit inside a function is not modelled")
    return "return;"


@opcode("trap", "brkpt")
def trap(w: FunctionWriter, ins: Instruction, m: Modifiers) -> str:
    return f'trap(t, "{ins.opcode}", {w.site()});'


@opcode("call")
def call(w: FunctionWriter, ins: Instruction, m: Modifiers) -> str:
    m.flag("uni")
    operands = list(ins.operands)
    results = operands.pop(0).items if isinstance(operands[0], Tuple) else ()
    name = symbol(w, operands[0])
    if name == "__assertfail":
        return f'trap(t, "assertion failed", {w.site()});'
    callee = w.owner.module.functions.get(name)
    if callee is None or callee.body is None:
        raise w.error(f"call of {name}, which has no body")
    args = operands[1].items if len(operands) > 1 and isinstance(operands[1], Tuple) else ()
    buffers = [f"s_{identifier(symbol(w, operand))}" for operand in (*results, *args)]
    return f"f_{identifier(name)}({', '.join(['t', *buffers])});"


@opcode("bar", "barrier")
def barrier(w: FunctionWriter, ins: Instruction, m: Modifiers) -> str:
    if m.flag("warp"):
        m.require("sync")
        return f"warp_sync(t, {w.read(ins.operands[0], 'u32')}, {w.site()});"
    m.take_all("cta", "aligned")
    action = m.require("sync", "arrive", "red")
    operands = list(ins.operands)
    if action == "red":
        return barrier_reduce(w, operands, m)
    which, *count = (w.read(operand, "u32") for operand in operands)
    name = "barrier" if action == "sync" else "barrier_arrive"
    return f"{name}(t, {which}, {count[0] if count else 0}, {w.site()});"


def barrier_reduce(w: FunctionWriter, operands: list[Operand], m: Modifiers) -> str:
    target, which, *count, value = operands
    how = m.require("popc", "and", "or")
    m.take_all("u32", "pred")
    expected = w.read(count[0], "u32") if count else "0"
    reduce = {"popc": "popc", "and": "all", "or": "any"}[how]
    result = (
        f"barrier_reduce(t, {w.read(which, 'u32')}, {expected}, Reduce::{reduce}, {w.read(value, 'pred')}, {w.site()})"
    )
    return w.write_to(target, "u32" if how == "popc" else "pred", result)


@opcode("nanosleep")
def nanosleep(w: FunctionWriter, ins: Instruction, m: Modifiers) -> str:
    m.flag("u32")
    return f"pause(t, {w.site()});"


@opcode("griddepcontrol")
def dependent_launch(w: FunctionWriter, ins: Instruction, m: Modifiers) -> str:
    m.require("wait", "launch_dependents")  # launches run one after another
    return ";"
