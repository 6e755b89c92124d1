"""cvt, cvta, mov: moves between types and between registers. Semantics of the conversions: runtime/convert.h."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.gpu_without_gpu.opcodes.registry import ROUNDINGS, Modifiers, opcode
from tests.gpu_without_gpu.ptx import Operand, Sink, Tuple, size_of

if TYPE_CHECKING:
    from tests.gpu_without_gpu.ptx import Instruction
    from tests.gpu_without_gpu.translate import FunctionWriter

FLOATS = ("f16", "bf16", "f32", "f64")
FP8 = ("e4m3x2", "e5m2x2")
INTEGER_ROUNDINGS = {"rni": "rn", "rzi": "rz", "rmi": "rm", "rpi": "rp"}


@opcode("cvt")
def convert(w: FunctionWriter, ins: Instruction, m: Modifiers) -> str:
    source, target = m.type(), m.type()
    if target in FP8 or source in FP8 or target.endswith("x2"):
        return convert_pair(w, ins, m, target, source)
    whole = m.choice(*INTEGER_ROUNDINGS)
    rounding = INTEGER_ROUNDINGS[whole] if whole else m.choice(*ROUNDINGS, "rna") or "rn"
    ftz, sat, relu = m.flag("ftz"), m.flag("sat"), m.flag("relu")
    value = w.read(ins.operands[1], source)
    if ftz and source == "f32":
        value = f"flush({value})"
    result = converted(w, value, source, target, rounding, whole is not None, sat)
    if relu:
        result = f"narrow<{target}>(relu(f64{{widen({result})}}))"
    if ftz and target == "f32":
        result = f"flush({result})"
    return w.write_to(ins.operands[0], target, result)


def converted(w: FunctionWriter, value: str, source: str, target: str, rounding: str, to_whole: bool, sat: bool) -> str:
    mode = f"Round::{rounding}"
    if source not in FLOATS and target not in FLOATS:
        return f"clamp_integer<{target}>({value})" if sat else f"static_cast<{target}>({value})"
    if source not in FLOATS:
        exact = f"integer_to_f32({value}, {mode})" if target == "f32" else f"static_cast<f64>({value})"
        return exact if target in ("f32", "f64") else f"to_{target}({exact}, {mode})"
    if source in ("f16", "bf16"):
        value = f"widen({value})"
    if target not in FLOATS:
        return f"to_integer<{target}>({value}, {mode})"
    if to_whole:
        value = f"round_to_integer({value}, {mode})"
    if sat:
        value = f"saturate_unit({value})"
    if target == "bf16" and source == "f32" and rounding == "rn":
        return f"to_bf16({value})"
    if target in ("f16", "bf16"):
        return f"to_{target}({value}, {mode})"
    if target != "f32":
        return f"static_cast<f64>({value})"
    single = f"to_f32({value}, {mode})"
    return f"canonical({single})" if source == "f16" else single


def convert_pair(w: FunctionWriter, ins: Instruction, m: Modifiers, target: str, source: str) -> str:
    """`d = {hi: a, lo: b}` from two f32, or between fp8x2 and f16x2."""
    rounding, finite, relu = m.choice(*ROUNDINGS), m.flag("satfinite"), m.flag("relu")
    if target in FP8:
        name = f"to_{target.removesuffix('x2')}"
        if source == "f32":
            hi, lo = (f"{name}({w.read(operand, 'f32')})" for operand in ins.operands[1:3])
        elif source == "f16x2":
            pair = w.read(ins.operands[1], source)
            hi, lo = f"{name}(widen({pair}.hi))", f"{name}(widen({pair}.lo))"
        else:
            raise w.error("unknown conversion")
        if relu or not finite:
            raise w.error("fp8 conversions are modelled with .satfinite and without .relu")
        return w.write_to(ins.operands[0], "b16", f"static_cast<u16>({lo} | {hi} << 8)")
    if source in FP8 and target == "f16x2":
        name = f"from_{source.removesuffix('x2')}"
        pair = w.read(ins.operands[1], "u16")
        lo, hi = f"{name}(static_cast<u8>({pair}))", f"{name}(static_cast<u8>({pair} >> 8))"
        return w.write_to(ins.operands[0], target, f"{target}{{{lo}, {hi}}}")
    if source != "f32" or target not in ("f16x2", "bf16x2"):
        raise w.error("unknown conversion")
    element = target.removesuffix("x2")
    args = [w.read(operand, "f32") for operand in ins.operands[1:3]]
    if relu:
        args = [f"relu({a})" for a in args]
    hi, lo = (f"to_{element}({a}, Round::{rounding or 'rn'}, {str(finite).lower()})" for a in args)
    return w.write_to(ins.operands[0], target, f"{target}{{{lo}, {hi}}}")


@opcode("cvta")
def convert_address(w: FunctionWriter, ins: Instruction, m: Modifiers) -> str:
    to_space = m.flag("to")
    space = m.require("global", "shared", "local", "const", "param", "shared::cta")
    t = m.type()
    value = w.read(ins.operands[1], t)
    if space.startswith("shared"):
        value = f"{'generic_to_shared' if to_space else 'shared_to_generic'}({value})"
    return w.write_to(ins.operands[0], t, value)


@opcode("mov")
def move(w: FunctionWriter, ins: Instruction, m: Modifiers) -> str:
    t = m.type()
    target, source = ins.operands
    if isinstance(target, Tuple):
        return unpack(w, target.items, source, t)
    if isinstance(source, Tuple):
        return w.write_to(target, f"b{8 * size_of(t)}", packed(w, source.items, t))
    return w.write_to(target, t, w.read(source, t))


def packed(w: FunctionWriter, items: tuple[Operand, ...], t: str) -> str:
    width = 8 * size_of(t)
    part = width // len(items)
    parts = [f"b{width}{{{w.read(item, f'b{part}')}}} << {part * i}" for i, item in enumerate(items)]
    return f"static_cast<b{width}>({' | '.join(parts)})"


def unpack(w: FunctionWriter, items: tuple[Operand, ...], source: Operand, t: str) -> str:
    width = 8 * size_of(t)
    part = width // len(items)
    stores = [
        w.write_to(item, f"b{part}", f"static_cast<b{part}>(whole >> {part * i})")
        for i, item in enumerate(items)
        if not isinstance(item, Sink)
    ]
    return f"{{ b{width} whole = {w.read(source, f'b{width}')}; {' '.join(stores)} }}"
