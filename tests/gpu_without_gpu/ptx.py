"""PTX as data: modules, functions, statements, operands. parser.py makes them, translate.py gives them meaning."""

from __future__ import annotations

from dataclasses import dataclass, field

_SIZES = {"pred": 1, "8": 1, "16": 2, "32": 4, "64": 8}


class PtxError(Exception):
    """PTX that the executor does not understand. Names the line."""


def size_of(type_name: str) -> int:
    """Bytes of a PTX type: `f32` 4, `bf16x2` 4, `pred` 1."""
    if type_name.endswith("x2"):
        return 2 * size_of(type_name.removesuffix("x2"))
    if type_name in ("e4m3", "e5m2"):
        return 1
    return _SIZES[type_name.lstrip("bsuf") if type_name != "pred" else "pred"]


def identifier(name: str) -> str:
    """A PTX name as part of a C++ name."""
    return name.lstrip("%").replace("$", "_S_")


@dataclass(frozen=True, slots=True)
class Register:
    name: str
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Integer:
    value: int


@dataclass(frozen=True, slots=True)
class FloatBits:
    """`0f3F800000` or `0d...`: the bits of an f32 or f64."""

    raw: int
    width: int


@dataclass(frozen=True, slots=True)
class Symbol:
    """A variable, a label or a function; resolved by whoever reads it."""

    name: str


@dataclass(frozen=True, slots=True)
class Sink:
    """`_`: the value is dropped."""


@dataclass(frozen=True, slots=True)
class Memory:
    base: Register | Symbol | Integer
    offset: int


@dataclass(frozen=True, slots=True)
class Tuple:
    """`{a, b}`, or `d|p` for the two results of shfl and setp, or the `(a, b)` of a call."""

    items: tuple[Operand, ...]


Operand = Register | Integer | FloatBits | Symbol | Sink | Memory | Tuple


@dataclass(frozen=True, slots=True)
class Location:
    """A source line, and the lines it was inlined at, innermost first. Line 0: unknown."""

    file: int
    line: int
    inlined_at: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Instruction:
    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Register | None
    location: Location
    ptx_line: int

    @property
    def text(self) -> str:
        return ".".join((self.opcode, *self.modifiers))


@dataclass(frozen=True, slots=True)
class Label:
    name: str


@dataclass(frozen=True, slots=True)
class BranchTargets:
    name: str
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Scope:
    opens: bool


@dataclass(frozen=True, slots=True)
class Registers:
    type: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Variable:
    """A `.global`, `.const`, `.shared`, `.local` or `.param` variable. `count` 0: `extern`, sized by the launch."""

    space: str
    type: str
    name: str
    count: int
    align: int
    initial: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        return self.count * size_of(self.type)


Statement = Instruction | Label | BranchTargets | Scope | Registers | Variable


@dataclass(slots=True)
class Function:
    name: str
    is_entry: bool
    params: list[Variable]
    results: list[Variable]
    directives: dict[str, tuple[int, ...]]
    body: list[Statement] | None = None  # None: only declared


@dataclass(slots=True)
class Module:
    files: dict[int, str] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)
    functions: dict[str, Function] = field(default_factory=dict)
