"""Integer, float and bit arithmetic, comparisons and selects. Semantics of the functions: runtime/arithmetic.h."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.gpu_without_gpu.opcodes.registry import ROUNDINGS, Modifiers, opcode
from tests.gpu_without_gpu.ptx import Integer, Tuple, size_of

if TYPE_CHECKING:
    from tests.gpu_without_gpu.ptx import Instruction
    from tests.gpu_without_gpu.translate import FunctionWriter

HALVES = ("f16", "bf16", "f16x2", "bf16x2")
COMPARISONS = {
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "lo": "<", "ls": "<=", "hi": ">", "hs": ">=",
}  # fmt: skip
UNORDERED = ("equ", "neu", "ltu", "leu", "gtu", "geu")


def is_float(type_name: str) -> bool:
    return type_name in ("f32", "f64")


def sources(w: FunctionWriter, ins: Instruction, type_name: str) -> list[str]:
    return [w.read(operand, type_name) for operand in ins.operands[1:]]


def float_result(w: FunctionWriter, function: str, args: list[str], type_name: str, m: Modifiers) -> str:
    """`function` applied with the rounding, `.ftz`, `.sat` and `.relu` of the instruction."""
    rounding, ftz, sat, relu = m.choice(*ROUNDINGS), m.flag("ftz"), m.flag("sat"), m.flag("relu")
    if type_name in HALVES:
        if rounding not in (None, "rn") or ftz:
            raise w.error("rounding and .ftz of 16-bit floats are not modelled")
        return half_result(function, args, type_name, sat, relu)
    if ftz:
        args = [f"flush({a})" for a in args]
    if rounding in (None, "rn"):
        result = f"{function}({', '.join(args)})"
    else:
        padded = args + [f"{type_name}{{0}}"] * (3 - len(args))
        if function == "rcp":
            function, padded = "div", [f"{type_name}{{1}}", args[0], padded[2]]
        result = f"directed(Op::{function}, Round::{rounding}, {', '.join(padded)})"
    if sat:
        result = f"saturate_unit({result})"
    return f"flush({result})" if ftz else result


def half_result(function: str, args: list[str], type_name: str, sat: bool = False, relu: bool = False) -> str:
    element = type_name.removesuffix("x2")
    names = "abc"[: len(args)]
    body = f"{function}({', '.join(f'f64{{widen({n})}}' for n in names)})"
    if sat:
        body = f"saturate_unit({body})"
    if relu:
        body = f"relu({body})"
    params = ", ".join(f"{element} {n}" for n in names)
    lambda_ = f"[]({params}) {{ return narrow<{element}>({body}); }}"
    return f"{'each_half' if type_name.endswith('x2') else 'apply'}({lambda_}, {', '.join(args)})"


@opcode("add", "sub", "mul", "fma", "div", "rcp", "sqrt")
def arithmetic(w: FunctionWriter, ins: Instruction, m: Modifiers) -> str:
    t = m.type()
    if t in HALVES or is_float(t):
        if m.flag("approx", "full") and t == "f64":
            return coarse_f64(w, ins, m)
        return w.write_to(ins.operands[0], t, float_result(w, ins.opcode, sources(w, ins, t), t, m))
    return integer_arithmetic(w, ins, m, t)


def integer_arithmetic(w: FunctionWriter, ins: Instruction, m: Modifiers, t: str) -> str:
    args = sources(w, ins, t)
    if ins.opcode == "mul":
        part = m.require("lo", "hi", "wide")
        result = f"{'mul' if part == 'lo' else 'mul_' + part}<{t}>({', '.join(args)})"
        return w.write_to(ins.operands[0], doubled(t) if part == "wide" else t, result)
    if ins.opcode in ("add", "sub") and m.flag("cc"):
        return carry_out(w, ins, t, args, "0")
    if ins.opcode in ("add", "sub") and m.flag("sat"):
        return w.write_to(ins.operands[0], t, f"{ins.opcode}_sat<{t}>({', '.join(args)})")
    if ins.opcode not in ("add", "sub", "div"):
        raise w.error("not an integer operation")
    return w.write_to(ins.operands[0], t, f"{ins.opcode}<{t}>({', '.join(args)})")


def carry_out(w: FunctionWriter, ins: Instruction, t: str, args: list[str], carry_in: str) -> str:
    u = f"u{8 * size_of(t)}"
    sign = "-" if ins.opcode.startswith("sub") else "+"
    wide = f"static_cast<unsigned __int128>({u}({args[0]})) {sign} {u}({args[1]}) {sign} {carry_in}"
    store = w.write_to(ins.operands[0], t, f"static_cast<{t}>(wide)")
    return f"{{ auto wide = {wide}; {store} carry = wide >> {8 * size_of(t)} & 1; }}"


@opcode("addc", "subc")
def with_carry(w: FunctionWriter, ins: Instruction, m: Modifiers) -> str:
    t = m.type()
    m.flag("cc")  # the carry is always kept: nothing reads it unless told to
    return carry_out(w, ins, t, sources(w, ins, t), "carry")


def doubled(t: str) -> str:
    return f"{t[0]}{16 * size_of(t)}"


@opcode("mad", "mad24", "mul24")
def multiply_add(w: FunctionWriter, ins: Instruction, m: Modifiers) -> str:
    t = m.type()
    if is_float(t):
        return w.write_to(ins.operands[0], t, float_result(w, "fma", sources(w, ins, t), t, m))
    part = m.require("lo", "hi", "wide")
    a, b = (w.read(operand, t) for operand in ins.operands[1:3])
    prefix = "mul24" if "24" in ins.opcode else "mul"
    name = prefix if prefix == "mul" and part == "lo" else f"{prefix}_{part}"
    result_type = doubled(t) if part == "wide" else t
    product = f"{name}<{t}>({a}, {b})"
    if ins.opcode == "mul24":
        return w.write_to(ins.operands[0], t, product)
    total = f"add<{result_type}>({product}, {w.read(ins.operands[3], result_type)})"
    return w.write_to(ins.operands[0], result_type, total)


@opcode("rem", "sad", "brev")
def integer_only(w: FunctionWriter, ins: Instruction, m: Modifiers) -> str:
    t = m.type().replace("b", "u")
    return w.write_to(ins.operands[0], t, f"{ins.opcode}<{t}>({', '.join(sources(w, ins, t))})")


@opcode("neg", "abs")
def sign(w: FunctionWriter, ins: Instruction, m: Modifiers) -> str:
    t = m.type()
    [a] = sources(w, ins, t)
    ftz = m.flag("ftz")
    if t in HALVES:
        width = 8 * size_of(t)
        mask = 0x80008000 if width == 32 else 0x8000
        change = f"^ {mask:#x}" if ins.opcode == "neg" else f"& {(1 << width) - 1 - mask:#x}"
        return w.write_to(ins.operands[0], f"b{width}", f"{w.read(ins.operands[1], f'b{width}')} {change}")
    result = f"{ins.opcode}<{t}>({a})"
    return w.write_to(ins.operands[0], t, f"flush({result})" if ftz else result)


@opcode("min", "max")
def extremum(w: FunctionWriter, ins: Instruction, m: Modifiers) -> str:
    t = m.type()
    nan, ftz = m.flag("NaN"), m.flag("ftz")
    name = ins.opcode + ("_nan" if nan else "")
    args = sources(w, ins, t)
    if t in HALVES:
        return w.write_to(ins.operands[0], t, half_result(name, args, t, relu=m.flag("relu")))
    if ftz:
        args = [f"flush({a})" for a in args]
    result = args[0]
    for other in args[1:]:
        result = f"{name}<{t}>({result}, {other})"
    if m.flag("relu"):
        result = f"{ins.opcode}<{t}>({result}, 0)"
    return w.write_to(ins.operands[0], t, result)


@opcode("rsqrt", "ex2", "lg2", "sin", "cos", "tanh")
def approximate(w: FunctionWriter, ins: Instruction, m: Modifiers) -> str:
    m.require("approx")
    t = m.type()
    [a] = sources(w, ins, t)
    ftz = m.flag("ftz")
    if t in HALVES:  # ex2 and tanh; `.ftz` is obligatory in the spelling of ex2.approx.ftz.bf16
        return w.write_to(ins.operands[0], t, half_result(f"{ins.opcode}", [a], t))
    if t == "f64":
        return coarse_f64(w, ins, m)
    result = f"{ins.opcode}({f'flush({a})' if ftz else a})"
    return w.write_to(ins.operands[0], t, f"flush({result})" if ftz else result)


def coarse_f64(w: FunctionWriter, ins: Instruction, m: Modifiers) -> str:
    """rcp and rsqrt of f64: seeds for Newton steps, which read and give only the upper 32 bits."""
    m.flag("ftz")
    if ins.opcode not in ("rcp", "rsqrt"):
        raise w.error("unknown approximation of f64")
    [a] = sources(w, ins, "f64")
    return w.write_to(ins.operands[0], "f64", f"upper_half({ins.opcode}(upper_half({a})))")


@opcode("copysign")
def copysign(w: FunctionWriter, ins: Instruction, m: Modifiers) -> str:
    t = m.type()
    return w.write_to(ins.operands[0], t, f"copysign({', '.join(sources(w, ins, t))})")


@opcode("testp")
def test_property(w: FunctionWriter, ins: Instruction, m: Modifiers) -> str:
    t = m.type()
    name = m.require("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    return w.write_to(ins.operands[0], "pred", f"testp_{name}({w.read(ins.operands[1], t)})")


# ---- bits


@opcode("and", "or", "xor")
def bitwise(w: FunctionWriter, ins: Instruction, m: Modifiers) -> str:
    t = m.type()
    a, b = sources(w, ins, t)
    symbol = {"and": "&", "or": "|", "xor": "^"}[ins.opcode]
    return w.write_to(ins.operands[0], t, f"{t}({a} {symbol} {b})")


@opcode("not", "cnot")
def complement(w: FunctionWriter, ins: Instruction, m: Modifiers) -> str:
    t = m.type()
    [a] = sources(w, ins, t)
    return w.write_to(ins.operands[0], t, f"!({a})" if t == "pred" or ins.opcode == "cnot" else f"{t}(~{a})")


@opcode("shl", "shr")
def shift(w: FunctionWriter, ins: Instruction, m: Modifiers) -> str:
    t = m.type()
    return w.write_to(
        ins.operands[0], t, f"{ins.opcode}<{t}>({w.read(ins.operands[1], t)}, {w.read(ins.operands[2], 'u32')})"
    )


@opcode("shf")
def funnel_shift(w: FunctionWriter, ins: Instruction, m: Modifiers) -> str:
    direction, mode = m.require("l", "r"), m.require("wrap", "clamp")
    t = m.type()
    lo, hi, n = sources(w, ins, "u32")
    amount = f"{n} & 31" if mode == "wrap" else f"min<u32>({n}, 32)"
    return w.write_to(ins.operands[0], t, f"shf_{direction}({lo}, {hi}, {amount})")


@opcode("popc", "clz")
def count_bits(w: FunctionWriter, ins: Instruction, m: Modifiers) -> str:
    t = m.type().replace("b", "u")
    return w.write_to(ins.operands[0], "u32", f"{ins.opcode}<{t}>({w.read(ins.operands[1], t)})")


@opcode("bfind")
def find_bit(w: FunctionWriter, ins: Instruction, m: Modifiers) -> str:
    t = m.type()
    name = "bfind_shift" if m.flag("shiftamt") else "bfind"
    return w.write_to(ins.operands[0], "u32", f"{name}<{t}>({w.read(ins.operands[1], t)})")


@opcode("bfe", "bfi")
def bit_field(w: FunctionWriter, ins: Instruction, m: Modifiers) -> str:
    t = m.type().replace("b", "u")
    *values, position, length = ins.operands[1:]
    args = [w.read(v, t) for v in values] + [w.read(v, "u32") for v in (position, length)]
    return w.write_to(ins.operands[0], t, f"{ins.opcode}<{t}>({', '.join(args)})")


@opcode("lop3")
def logic(w: FunctionWriter, ins: Instruction, m: Modifiers) -> str:
    t = m.type()
    table = ins.operands[4]
    if not isinstance(table, Integer):
        raise w.error("the table of lop3 must be an immediate")
    args = ", ".join(w.read(operand, "u32") for operand in ins.operands[1:4])
    return w.write_to(ins.operands[0], t, f"lop3<{table.value}>({args})")


@opcode("prmt")
def permute(w: FunctionWriter, ins: Instruction, m: Modifiers) -> str:
    t = m.type()
    return w.write_to(ins.operands[0], t, f"prmt({', '.join(sources(w, ins, 'u32'))})")


@opcode("dp4a")
def dot_product(w: FunctionWriter, ins: Instruction, m: Modifiers) -> str:
    b_type, a_type = m.type(), m.type()
    bytes_of = {"s32": "s8", "u32": "u8"}
    args = ", ".join(sources(w, ins, "u32"))
    return w.write_to(ins.operands[0], "b32", f"dp4a<{bytes_of[a_type]}, {bytes_of[b_type]}>({args})")


# ---- comparisons


def comparison(w: FunctionWriter, a: str, b: str, how: str, t: str, ftz: bool) -> str:
    if ftz:
        a, b = f"flush({a})", f"flush({b})"
    if how in ("num", "nan"):
        return f"{'!' if how == 'num' else ''}unordered<{t}>({a}, {b})"
    symbol = COMPARISONS[how.removesuffix("u") if how in UNORDERED else how]
    if t == "pred":
        return f"({a} {symbol} {b})"
    plain = f"({a} {symbol} {b})"
    if not is_float(t):
        return plain
    if how in UNORDERED:
        return f"(unordered<{t}>({a}, {b}) || {plain})"
    return f"(!unordered<{t}>({a}, {b}) && {plain})" if how == "ne" else plain


def compare_values(w: FunctionWriter, ins: Instruction, m: Modifiers, t: str, how: str) -> list[str]:
    """The comparison's truth: one expression, or two for the packed 16-bit types."""
    ftz = m.flag("ftz")
    a, b = (w.read(operand, t) for operand in ins.operands[1:3])
    if t in ("f16x2", "bf16x2"):
        return [comparison(w, f"widen({a}.{half})", f"widen({b}.{half})", how, "f32", ftz) for half in ("lo", "hi")]
    if t in HALVES:
        return [comparison(w, f"widen({a})", f"widen({b})", how, "f32", ftz)]
    return [comparison(w, a, b, how, t, ftz)]


@opcode("setp")
def set_predicate(w: FunctionWriter, ins: Instruction, m: Modifiers) -> str:
    how = m.require(*COMPARISONS, *UNORDERED, "num", "nan")
    combine = m.choice("and", "or", "xor")
    t = m.type()
    truths = compare_values(w, ins, m, t, how)
    if len(truths) == 1:
        truths.append(f"!({truths[0]})")
    if combine is not None:
        symbol = {"and": "&&", "or": "||", "xor": "!="}[combine]
        truths = [f"(({truth}) {symbol} {w.read(ins.operands[3], 'pred')})" for truth in truths]
    targets = ins.operands[0].items if isinstance(ins.operands[0], Tuple) else (ins.operands[0],)
    if len(targets) == 1:
        return w.write_to(targets[0], "pred", truths[0])
    first, second = (
        w.write_to(target, "pred", name) for target, name in zip(targets, ("first", "second"), strict=True)
    )
    return f"{{ bool first = {truths[0]}, second = {truths[1]}; {first} {second} }}"


@opcode("set")
def set_value(w: FunctionWriter, ins: Instruction, m: Modifiers) -> str:
    source, target = m.type(), m.type()
    how = m.require(*COMPARISONS, *UNORDERED, "num", "nan")
    truths = compare_values(w, ins, m, source, how)
    ones = {"u32": "~0u", "s32": "~0u", "f32": "0x3f800000u", "f16": "u16{0x3c00}", "bf16": "u16{0x3f80}"}
    if target.endswith("x2"):
        one = "0x3c00u" if target == "f16x2" else "0x3f80u"
        return w.write_to(ins.operands[0], "b32", f"({truths[0]} ? {one} : 0) | ({truths[1]} ? {one} << 16 : 0)")
    if len(truths) > 1:  # two lanes as masks of 16 bits
        return w.write_to(ins.operands[0], "b32", f"({truths[0]} ? 0xffffu : 0) | ({truths[1]} ? 0xffff0000u : 0)")
    one = ones[target]
    return w.write_to(ins.operands[0], f"b{8 * size_of(target)}", f"({truths[0]} ? {one} : decltype({one}){{0}})")


@opcode("selp")
def select(w: FunctionWriter, ins: Instruction, m: Modifiers) -> str:
    t = m.type()
    a, b, p = ins.operands[1:]
    return w.write_to(ins.operands[0], t, f"{w.read(p, 'pred')} ? {w.read(a, t)} : {w.read(b, t)}")


@opcode("slct")
def select_by_sign(w: FunctionWriter, ins: Instruction, m: Modifiers) -> str:
    by, t = m.type(), m.type()
    m.flag("ftz")  # flushing does not change a sign test
    a, b, c = ins.operands[1:]
    return w.write_to(ins.operands[0], t, f"{w.read(c, by)} >= 0 ? {w.read(a, t)} : {w.read(b, t)}")
