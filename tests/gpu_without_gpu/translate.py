"""A parsed PTX module to C++ over the runtime library.

Each function becomes a C++ function whose registers are local variables and whose branches are gotos; each instruction
becomes one statement, written by its handler in opcodes/. Sites number the instructions that can fail, for messages.
Shared variables get addresses here, with gaps between them so that an overrun is seen.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.gpu_without_gpu import opcodes
from tests.gpu_without_gpu.ptx import (
    BranchTargets,
    FloatBits,
    Function,
    Instruction,
    Integer,
    Label,
    Memory,
    Module,
    Operand,
    PtxError,
    Register,
    Registers,
    Scope,
    Sink,
    Statement,
    Symbol,
    Tuple,
    Variable,
    identifier,
    size_of,
)

SHARED_WINDOW = 1024  # kSharedWindow in runtime/memory.h
_GAP = 128
_SPECIAL = {
    **{f"%{name}.{axis}": f"view(t).{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"},
    "%laneid": "view(t).lane",
    "%warpid": "view(t).warp",
    "%lanemask_eq": "(1u << view(t).lane)",
    "%lanemask_lt": "((1u << view(t).lane) - 1)",
    "%lanemask_le": "(((1u << view(t).lane) - 1) | 1u << view(t).lane)",
    "%lanemask_gt": "~(((1u << view(t).lane) - 1) | 1u << view(t).lane)",
    "%lanemask_ge": "~((1u << view(t).lane) - 1)",
    "%dynamic_smem_size": "view(t).dynamic_shared",
    "%total_smem_size": "view(t).total_shared",
    "%clock": "static_cast<u32>(clock64(t))",
    "%clock64": "clock64(t)",
    "%globaltimer": "clock64(t)",
    "%smid": "0u",
    "%nsmid": "1u",
    "%gridid": "u64{0}",
    "%cluster_ctarank": "0u",
    "%cluster_nctarank": "1u",
}


@dataclass(frozen=True, slots=True)
class Site:
    """Where an instruction comes from: `file:line`, the lines it was inlined at, and its PTX."""

    lines: tuple[str, ...]
    ptx: str
    has_lines: bool = True

    def __str__(self) -> str:
        return f"{', inlined at '.join(self.lines)} ({self.ptx})"


@dataclass(frozen=True, slots=True)
class Param:
    nbytes: int
    offset: int


@dataclass(frozen=True, slots=True)
class Kernel:
    name: str
    params: tuple[Param, ...]
    shared: tuple[tuple[int, int], ...]  # [begin, end) of each static shared variable, in window addresses
    static_shared: int  # their bytes, without the gaps
    dynamic_base: int
    max_threads: int


@dataclass(frozen=True, slots=True)
class GlobalVariable:
    name: str
    initial: bytes
    constant: bool


@dataclass(frozen=True, slots=True)
class Translation:
    units: dict[str, str]  # kernel name -> the C++ that runs it
    kernels: dict[str, Kernel]
    variables: tuple[GlobalVariable, ...]
    sites: tuple[Site, ...]  # site 0 is nowhere
    opcodes: frozenset[str]


def translate(module: Module) -> Translation:
    """Raises PtxError for an opcode, modifier or operand that the executor does not model."""
    return _ModuleWriter(module).translate()


def _aligned(at: int, align: int) -> int:
    return (at + align - 1) // align * align


class _ModuleWriter:
    def __init__(self, module: Module) -> None:
        self.module = module
        self.sites: list[Site] = [Site((), "")]
        self.seen: set[str] = set()
        self.shared: dict[str, int] = {}
        self.names: dict[str, Variable] = {v.name: v for v in module.variables}

    def translate(self) -> Translation:
        entries = [f for f in self.module.functions.values() if f.is_entry and f.body is not None]
        static = [v for v in self.module.variables if v.space == "shared" and v.count]
        common_end, common = self._layout(static, SHARED_WINDOW)
        own: dict[str, list[tuple[int, int]]] = {}
        top = common_end
        for entry in entries:
            assert entry.body is not None
            variables = [s for s in entry.body if isinstance(s, Variable) and s.space == "shared"]
            end, own[entry.name] = self._layout(variables, common_end)
            top = max(top, end)
        dynamic_base = _aligned(top, 1024)
        for v in self.module.variables:
            if v.space == "shared" and not v.count:
                self.shared[v.name] = dynamic_base
        kernels = {f.name: self._kernel(f, (*common, *own[f.name]), dynamic_base) for f in entries}
        written = {
            f.name: FunctionWriter(self, f).write() for f in self.module.functions.values() if f.body is not None
        }
        helpers = [f for f in self.module.functions.values() if not f.is_entry and f.body is not None]
        common_text = [
            '#include "device.h"\nnamespace gpu {',
            *(f'extern "C" u64 v_{identifier(v.name)};\nu64 v_{identifier(v.name)};' for v in self._globals()),
            *(self.signature(f) + ";" for f in helpers),
            *(written[f.name] for f in helpers),
        ]
        units = {name: "\n".join((*common_text, written[name], "}  // namespace gpu\n")) for name in kernels}
        globals_ = tuple(GlobalVariable(v.name, _initial_bytes(v), v.space == "const") for v in self._globals())
        return Translation(units, kernels, globals_, tuple(self.sites), frozenset(self.seen))

    def _globals(self) -> list[Variable]:
        return [v for v in self.module.variables if v.space != "shared"]

    def _layout(self, variables: list[Variable], at: int) -> tuple[int, list[tuple[int, int]]]:
        regions = []
        for v in variables:
            at = _aligned(at, max(v.align, 16))
            self.shared[v.name] = at
            self.names[v.name] = v
            regions.append((at, at + v.nbytes))
            at = _aligned(at + v.nbytes + _GAP, _GAP)
        return at, regions

    def _kernel(self, function: Function, regions: tuple[tuple[int, int], ...], dynamic_base: int) -> Kernel:
        params, at = [], 0
        for p in function.params:
            at = _aligned(at, p.align)
            params.append(Param(p.nbytes, at))
            at += p.nbytes
        bounds = function.directives.get("reqntid") or function.directives.get("maxntid") or (1024,)
        threads = 1
        for n in bounds:
            threads *= n
        used = sum(end - begin for begin, end in regions)
        return Kernel(function.name, tuple(params), regions, used, dynamic_base, threads)

    @staticmethod
    def signature(function: Function) -> str:
        if function.is_entry:
            return f'extern "C" void kernel_{identifier(function.name)}(Thread* t, const u8* params)'
        results = [f"u8* s_{identifier(r.name)}" for r in function.results]
        params = [f"const u8* s_{identifier(p.name)}" for p in function.params]
        return f"static void f_{identifier(function.name)}({', '.join(['Thread* t', *results, *params])})"


def _initial_bytes(v: Variable) -> bytes:
    width = size_of(v.type)
    data = b"".join((value & (1 << 8 * width) - 1).to_bytes(width, "little") for value in v.initial)
    return data.ljust(v.nbytes, b"\0")


@dataclass(slots=True)
class FunctionWriter:
    """Writes one function. Handlers in opcodes/ call `read`, `write`, `address` and `site`."""

    owner: _ModuleWriter
    function: Function
    scopes: list[dict[str, str]] = field(default_factory=lambda: [{}])  # register name -> PTX type
    locals: dict[str, Variable] = field(default_factory=dict)
    targets: dict[str, tuple[str, ...]] = field(default_factory=dict)
    instruction: Instruction | None = None

    def write(self) -> str:
        f = self.function
        lines = [self.owner.signature(f), "{"]
        for p in (*f.params, *f.results):
            self.locals[p.name] = p
        if f.is_entry:
            kernel = self.owner._kernel(f, (), 0)
            lines += [
                f"const u8* s_{identifier(v.name)} = params + {p.offset};"
                for v, p in zip(f.params, kernel.params, strict=True)
            ]
        lines.append("u32 carry = 0; (void)carry;")
        assert f.body is not None
        self.targets = {s.name: s.labels for s in f.body if isinstance(s, BranchTargets)}
        lines += [self._statement(s) for s in f.body]
        return "\n".join([*lines, "}"])

    def _statement(self, s: Statement) -> str:
        match s:
            case Instruction():
                return self._instruction(s)
            case Label(name):
                return f"L_{identifier(name)}: ;"
            case BranchTargets():
                return ""
            case Scope(opens):
                if opens:
                    self.scopes.append({})
                else:
                    self.scopes.pop()
                return "{" if opens else "}"
            case Registers(type_name, names):
                for name in names:
                    self.scopes[-1][name] = type_name
                cpp = "pred" if type_name == "pred" else f"b{8 * size_of(type_name)}"
                return f"{cpp} {', '.join(f'r_{identifier(n)}' for n in names)};" if names else ""
            case Variable():
                return self._variable(s)

    def _variable(self, v: Variable) -> str:
        if v.space == "shared":
            return ""
        self.locals[v.name] = v
        name = identifier(v.name)
        declared = f"alignas({max(v.align, 16)}) u8 s_{name}[{max(v.nbytes, 1)}];"
        if v.space == "local":
            declared += f" u8 w_{name}[{v.nbytes}]; LocalFrame frame_{name}(t, s_{name}, {v.nbytes}, w_{name});"
        return declared

    def _instruction(self, ins: Instruction) -> str:
        self.instruction = ins
        self.owner.seen.add(ins.text)
        code = opcodes.write(self, ins)
        if ins.guard is None:
            return code
        return f"if ({self.read(Register(ins.guard.name, ins.guard.negated), 'pred')}) {{ {code} }}"

    def error(self, what: str) -> PtxError:
        ins = self.instruction
        assert ins is not None
        return PtxError(f"{what}: `{ins.text}` at PTX line {ins.ptx_line}, {', '.join(self._lines(ins))}")

    def _lines(self, ins: Instruction) -> tuple[str, ...]:
        if not ins.location.line:
            return (f"PTX line {ins.ptx_line}",)
        places = ((ins.location.file, ins.location.line), *ins.location.inlined_at)
        return tuple(f"{self.owner.module.files.get(file, '?')}:{line}" for file, line in places)

    # ---- what handlers use

    def site(self) -> int:
        ins = self.instruction
        assert ins is not None
        self.owner.sites.append(Site(self._lines(ins), ins.text, ins.location.line > 0))
        return len(self.owner.sites) - 1

    def register_type(self, name: str) -> str | None:
        return next((scope[name] for scope in reversed(self.scopes) if name in scope), None)

    def read(self, operand: Operand, type_name: str) -> str:
        """A C++ expression of the PTX type `type_name`."""
        match operand:
            case Register(name, negated):
                declared = self.register_type(name)
                if declared is None and name in _SPECIAL:
                    return f"as<{type_name}>({_SPECIAL[name]})"
                if declared is None:
                    raise self.error(f"unknown register {name}")
                if (declared == "pred") != (type_name == "pred"):
                    raise self.error(f"register {name} is .{declared}, read as .{type_name}")
                if type_name == "pred":
                    return ("!" if negated else "") + f"r_{identifier(name)}"
                return f"as<{type_name}>(r_{identifier(name)})"
            case Integer(value):
                if type_name == "pred":
                    return "true" if value else "false"
                width = 8 * size_of(type_name)
                return f"as<{type_name}>(static_cast<b{width}>({value & (1 << width) - 1:#x}ull))"
            case FloatBits(raw, width):
                return f"as<{type_name}>(b{width}{{{raw:#x}}})"
            case Symbol(name):
                if self.register_type(name) is not None:
                    return self.read(Register(name), type_name)
                if name == "WARP_SZ":
                    return f"{type_name}{{32}}"
                return f"as<{type_name}>({self.symbol_address(name)})"
        raise self.error(f"cannot read operand {operand}")

    def write_to(self, operand: Operand, type_name: str, expression: str) -> str:
        """A C++ statement that stores `expression`, of the PTX type `type_name`, in a register."""
        if isinstance(operand, Sink):
            return f"(void)({expression});"
        name = operand.name if isinstance(operand, Register | Symbol) else None
        declared = self.register_type(name) if name is not None else None
        if name is None or declared is None:
            raise self.error(f"cannot write operand {operand}")
        if type_name == "pred" or declared == "pred":
            return f"r_{identifier(name)} = {expression};"
        return f"r_{identifier(name)} = bits<b{8 * size_of(declared)}>({expression});"

    def symbol_address(self, name: str) -> str:
        if name in self.owner.shared:
            return f"u64{{{self.owner.shared[name]}}}"
        if name in self.locals:
            return f"reinterpret_cast<u64>(s_{identifier(name)})"
        if name in self.owner.names:
            return f"v_{identifier(name)}"
        raise self.error(f"unknown symbol {name}")

    def address(self, operand: Operand) -> str:
        if not isinstance(operand, Memory):
            raise self.error(f"expected a memory operand, found {operand}")
        match operand.base:
            case Integer(value):
                return f"u64{{{value + operand.offset}}}"
            case base:
                offset = f" + static_cast<u64>({operand.offset}ll)" if operand.offset else ""
                width = self.register_type(base.name) if isinstance(base, Register | Symbol) else None
                if width is not None and size_of(width) == 4:  # 32-bit addresses wrap at 32 bits
                    return f"u64{{static_cast<u32>({self.read(base, 'u32')}{offset})}}"
                return f"({self.read(base, 'u64')}{offset})"

    def items(self, operand: Operand) -> tuple[Operand, ...]:
        return operand.items if isinstance(operand, Tuple) else (operand,)
