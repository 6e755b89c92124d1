"""Loads, stores, atomics, fences and asynchronous copies. Checks: runtime/memory.cpp."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.gpu_without_gpu.opcodes.registry import Modifiers, opcode
from tests.gpu_without_gpu.ptx import Integer, Memory, Operand, Register, Symbol, size_of

if TYPE_CHECKING:
    from tests.gpu_without_gpu.ptx import Instruction
    from tests.gpu_without_gpu.translate import FunctionWriter

SPACES = ("global", "shared", "shared::cta", "local", "const", "param", "param::entry", "param::func")
FUNCTIONS = {
    "global": "global_access", "shared": "shared_access", "local": "local_access",
    "const": "constant_access", "generic": "generic_access",
}  # fmt: skip
SCOPES = ("cta", "cluster", "gpu", "sys")
# Hints to caches change no result.
CACHE = (
    "ca", "cg", "cs", "cv", "lu", "wb", "wt", "nc", "L1::no_allocate", "L1::evict_first", "L1::evict_last",
    "L1::evict_normal", "L1::evict_unchanged", "L2::64B", "L2::128B", "L2::256B",
)  # fmt: skip
MAX_BYTES = 16


def take_space(m: Modifiers) -> str:
    return (m.choice(*SPACES) or "generic").partition("::")[0]


def take_order(m: Modifiers) -> tuple[bool, str | None]:
    """Whether the access is strong, and its acquire or release."""
    order = m.choice("weak", "volatile", "relaxed", "acquire", "release", "acq_rel")
    m.take_all(*SCOPES)
    return order not in (None, "weak"), order if order in ("acquire", "release", "acq_rel") else None


def take_vector(w: FunctionWriter, m: Modifiers, type_name: str) -> int:
    vector = m.choice("v2", "v4", "v8")
    count = int(vector[1]) if vector else 1
    if count * size_of(type_name) > MAX_BYTES:
        raise w.error("accesses of more than 16 bytes are not modelled")
    return count


@opcode("ld", "ldu")
def load(w: FunctionWriter, ins: Instruction, m: Modifiers) -> str:
    t = m.type()
    strong, order = take_order(m)
    space, count = take_space(m), take_vector(w, m, t)
    m.take_all(*CACHE)
    target, source = ins.operands
    if space == "param":
        fetch = f"Vector<{t}, {count}> v; memcpy(&v, {param_pointer(w, source)}, sizeof v);"
    else:
        kind = "Access::strong_read" if strong else "Access::read"
        fetch = f"auto v = load<{FUNCTIONS[space]}, {t}, {count}>(t, {w.address(source)}, {w.site()}, {kind});"
    stores = [w.write_to(item, t, f"v.e[{i}]") for i, item in enumerate(w.items(target))]
    acquire = " acquire(t);" if order == "acquire" else ""
    return f"{{ {fetch} {' '.join(stores)}{acquire} }}"


@opcode("st")
def store(w: FunctionWriter, ins: Instruction, m: Modifiers) -> str:
    t = m.type()
    strong, order = take_order(m)
    space, count = take_space(m), take_vector(w, m, t)
    m.take_all(*CACHE)
    target, source = ins.operands
    values = ", ".join(w.read(item, t) for item in w.items(source))
    value = f"Vector<{t}, {count}>{{{{{values}}}}}"
    if space == "param":
        return f"{{ auto v = {value}; memcpy(const_cast<u8*>({param_pointer(w, target)}), &v, sizeof v); }}"
    kind = "Access::strong_write" if strong else "Access::write"
    release = "release(t); " if order == "release" else ""
    return f"{release}store<{FUNCTIONS[space]}, {t}, {count}>(t, {w.address(target)}, {value}, {w.site()}, {kind});"


def param_pointer(w: FunctionWriter, operand: Operand) -> str:
    """Parameters are plain buffers of the C++ function; a register base holds their address."""
    if not isinstance(operand, Memory) or not isinstance(operand.base, Symbol | Register):
        raise w.error("unknown parameter address")
    return f"reinterpret_cast<const u8*>({w.read(operand.base, 'u64')}) + {operand.offset}"


@opcode("atom", "red")
def atomic(w: FunctionWriter, ins: Instruction, m: Modifiers) -> str:
    t = m.type()
    _, order = take_order(m)
    space = take_space(m)
    m.flag("noftz")
    how = m.require("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")
    target, (where, *values) = (ins.operands[0], ins.operands[1:]) if ins.opcode == "atom" else (None, ins.operands)
    args = [w.read(v, t) for v in values]
    update = atomic_update(how, t, args)
    before = "release(t); " if order in ("release", "acq_rel") else ""
    after = " acquire(t);" if order in ("acquire", "acq_rel") else ""
    call = (
        f"auto old = atomic<{FUNCTIONS[space]}, {t}>(t, {w.address(where)}, {w.site()}, "
        f"[&]({t} old) -> {t} {{ return {update}; }});"
    )
    result = w.write_to(target, t, "old") if target is not None else "(void)old;"
    return f"{{ {before}{call} {result}{after} }}"


def atomic_update(how: str, t: str, args: list[str]) -> str:
    a = args[0]
    if how == "add" and t in ("f16", "bf16", "f16x2", "bf16x2"):
        element = t.removesuffix("x2")
        lift = "each_half" if t.endswith("x2") else "apply"
        return (
            f"{lift}([]({element} a, {element} b) {{ return narrow<{element}>(f64{{widen(a)}} + f64{{widen(b)}}); }},"
            f" old, {a})"
        )
    return {
        "add": f"add<{t}>(old, {a})",
        "min": f"min<{t}>(old, {a})",
        "max": f"max<{t}>(old, {a})",
        "and": f"old & {a}",
        "or": f"old | {a}",
        "xor": f"old ^ {a}",
        "exch": a,
        "cas": f"old == {a} ? {args[-1]} : old",
        "inc": f"old >= {a} ? 0 : old + 1",
        "dec": f"old == 0 || old > {a} ? {a} : old - 1",
    }[how]


@opcode("membar", "fence")
def fence(w: FunctionWriter, ins: Instruction, m: Modifiers) -> str:
    m.take_all("sc", "acq_rel", "cta", "cluster", "gpu", "gl", "sys")
    if m.flag("proxy"):
        m.take_all("async", "alias")
    return "fence(t);"


@opcode("prefetch", "prefetchu", "applypriority", "discard")
def cache_hint(w: FunctionWriter, ins: Instruction, m: Modifiers) -> str:
    m.take_all("global", "L1", "L2", "L2::evict_last", "L2::evict_normal", "local", "128")
    return ";"


@opcode("cp")
def copy_async(w: FunctionWriter, ins: Instruction, m: Modifiers) -> str:
    m.require("async")
    if m.flag("commit_group"):
        return "copy_async_commit(t);"
    if m.flag("wait_all"):
        return "copy_async_commit(t); copy_async_wait(t, 0);"
    if m.flag("wait_group"):
        return f"copy_async_wait(t, {immediate(w, ins.operands[0])});"
    if m.require("ca", "cg") == "cg" and immediate(w, ins.operands[2]) != 16:
        raise w.error("cp.async.cg copies 16 bytes")
    m.require("shared", "shared::cta")
    m.require("global")
    m.take_all(*CACHE)
    to, source, size = ins.operands[:3]
    nbytes = immediate(w, size)
    if nbytes not in (4, 8, 16):
        raise w.error("cp.async copies 4, 8 or 16 bytes")
    source_bytes = str(nbytes)
    if len(ins.operands) > 3:
        last = ins.operands[3]
        ignores = isinstance(last, Register) and w.register_type(last.name) == "pred"
        source_bytes = f"({w.read(last, 'pred')} ? 0 : {nbytes})" if ignores else w.read(last, "u32")
    return f"copy_async(t, {w.address(to)}, {w.address(source)}, {nbytes}, {source_bytes}, {w.site()});"


def immediate(w: FunctionWriter, operand: Operand) -> int:
    if not isinstance(operand, Integer):
        raise w.error("expected an immediate")
    return operand.value
