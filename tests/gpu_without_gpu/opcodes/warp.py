"""Exchanges between the lanes of a warp. Semantics: runtime/warp.cpp."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.gpu_without_gpu.opcodes.registry import Modifiers, opcode
from tests.gpu_without_gpu.ptx import Tuple

if TYPE_CHECKING:
    from tests.gpu_without_gpu.ptx import Instruction
    from tests.gpu_without_gpu.translate import FunctionWriter


@opcode("shfl")
def shuffle(w: FunctionWriter, ins: Instruction, m: Modifiers) -> str:
    m.require("sync")
    mode = m.require("up", "down", "bfly", "idx")
    m.require("b32")
    value, b, clamp, mask = (w.read(operand, "u32") for operand in ins.operands[1:])
    call = f"auto got = shuffle(t, Shuffle::{mode}, {value}, {b}, {clamp}, {mask}, {w.site()});"
    if isinstance(ins.operands[0], Tuple):
        target, in_range = ins.operands[0].items
        return f"{{ {call} {w.write_to(target, 'u32', 'got.value')} {w.write_to(in_range, 'pred', 'got.in_range')} }}"
    return f"{{ {call} {w.write_to(ins.operands[0], 'u32', 'got.value')} }}"


@opcode("vote")
def vote(w: FunctionWriter, ins: Instruction, m: Modifiers) -> str:
    m.require("sync")
    how = m.require("ballot", "any", "all", "uni")
    m.require("b32", "pred")
    value, mask = w.read(ins.operands[1], "pred"), w.read(ins.operands[2], "u32")
    site = w.site()
    if how == "ballot":
        return w.write_to(ins.operands[0], "u32", f"ballot(t, {value}, {mask}, {site})")
    if how == "uni":
        return w.write_to(ins.operands[0], "pred", f"vote_uniform(t, {value}, {mask}, {site})")
    test = "!= 0" if how == "any" else f"== {mask}"
    return w.write_to(ins.operands[0], "pred", f"ballot(t, {value}, {mask}, {site}) {test}")


@opcode("activemask")
def active_mask(w: FunctionWriter, ins: Instruction, m: Modifiers) -> str:
    m.require("b32")
    # Hardware may return any set of converged lanes; the smallest finds code that assumes more.
    return w.write_to(ins.operands[0], "u32", "1u << view(t).lane")


@opcode("match")
def match(w: FunctionWriter, ins: Instruction, m: Modifiers) -> str:
    how = m.require("any", "all")
    m.require("sync")
    t = m.require("b32", "b64")
    value, mask = w.read(ins.operands[1], t), w.read(ins.operands[2], "u32")
    if how == "any":
        return w.write_to(ins.operands[0], "u32", f"match_any(t, {value}, {mask}, {w.site()})")
    target, *predicate = w.items(ins.operands[0])
    stores = w.write_to(target, "u32", "matched.mask")
    if predicate:
        stores += " " + w.write_to(predicate[0], "pred", "matched.all")
    return f"{{ auto matched = match_all(t, {value}, {mask}, {w.site()}); {stores} }}"


@opcode("redux")
def reduce(w: FunctionWriter, ins: Instruction, m: Modifiers) -> str:
    m.require("sync")
    how, t = m.require("add", "min", "max", "and", "or", "xor"), m.require("u32", "s32", "b32")
    name = f"{how}_{t[0]}" if how in ("min", "max") else how if how == "add" else how + "_"
    value, mask = w.read(ins.operands[1], "u32"), w.read(ins.operands[2], "u32")
    return w.write_to(ins.operands[0], "u32", f"redux(t, Redux::{name}, {value}, {mask}, {w.site()})")


@opcode("elect")
def elect(w: FunctionWriter, ins: Instruction, m: Modifiers) -> str:
    m.require("sync")
    leader, predicate = w.items(ins.operands[0])
    call = f"auto elected = elect(t, {w.read(ins.operands[1], 'u32')}, {w.site()});"
    stores = f"{w.write_to(leader, 'u32', 'elected.leader')} {w.write_to(predicate, 'pred', 'elected.is_leader')}"
    return f"{{ {call} {stores} }}"
