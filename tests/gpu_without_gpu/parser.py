"""PTX text to typed statements.

Owns the grammar of what NVRTC emits and of inline asm inside it. It knows no opcode's meaning. Anything else raises
PtxError with the line of the PTX text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tests.gpu_without_gpu.ptx import (
    BranchTargets,
    FloatBits,
    Function,
    Instruction,
    Integer,
    Label,
    Location,
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
    size_of,
)

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\f]+)|(?P<line>\n)|(?P<comment>//[^\n]*|/\*.*?\*/)|(?P<string>"[^"\n]*")
    |(?P<word>[%$.\w]+)|(?P<mark>[{}()\[\],;:@!|<>=+\-])""",
    re.VERBOSE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class _Token:
    text: str
    line: int


def _tokens(text: str) -> Iterator[_Token]:
    line, at = 1, 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise PtxError(f"PTX line {line}: unexpected character {text[at]!r}")
        token = match.group()
        if match.lastgroup in ("word", "mark", "string"):
            yield _Token(token, line)
        line += token.count("\n")
        at = match.end()


def parse(text: str) -> Module:
    """Parse a PTX module. Raises PtxError."""
    head, _, _ = text.partition("\n\t.section")  # debug information follows the code
    return _Parser(list(_tokens(head))).module()


class _Parser:
    def __init__(self, tokens: list[_Token]) -> None:
        self._tokens = tokens
        self._at = 0
        self._location = Location(0, 0)

    # ---- tokens

    @property
    def _line(self) -> int:
        return self._tokens[min(self._at, len(self._tokens) - 1)].line

    def _peek(self, ahead: int = 0) -> str:
        at = self._at + ahead
        return self._tokens[at].text if at < len(self._tokens) else ""

    def _next(self) -> str:
        text = self._peek()
        if not text:
            raise PtxError("PTX ends in the middle of a statement")
        self._at += 1
        return text

    def _take(self, text: str) -> bool:
        if self._peek() != text:
            return False
        self._at += 1
        return True

    def _expect(self, text: str) -> None:
        if not self._take(text):
            raise PtxError(f"PTX line {self._line}: expected {text!r}, found {self._peek()!r}")

    def _integer(self) -> int:
        negative = self._take("-")
        word = self._next().rstrip("U")
        try:
            value = int(word, 8) if re.fullmatch(r"0[0-7]+", word) else int(word, 0)
        except ValueError:
            raise PtxError(f"PTX line {self._line}: expected an integer, found {word!r}") from None
        return -value if negative else value

    # ---- module level

    def module(self) -> Module:
        module = Module()
        while self._peek():
            word = self._next()
            if word == ".version":
                self._next()
            elif word == ".target":
                self._next()
                while self._take(","):
                    self._next()
            elif word == ".address_size":
                self._next()
            elif word == ".file":
                number = self._integer()
                module.files[number] = self._next().strip('"')
                while self._take(","):
                    self._integer()
            elif word in (".visible", ".weak", ".extern", ".common"):
                continue
            elif word in (".entry", ".func"):
                function = self._function(word == ".entry")
                module.functions[function.name] = function
            elif word in (".global", ".const", ".shared"):
                module.variables.append(self._variable(word[1:]))
                self._expect(";")
            else:
                raise PtxError(f"PTX line {self._line}: unknown directive {word!r}")
        return module

    def _variable(self, space: str) -> Variable:
        """After the space: `.align 4 .b8 name[16] = {...}`, without the semicolon."""
        align, type_name = 0, ""
        while self._peek().startswith("."):
            word = self._next()[1:]
            if word == "align":
                align = self._integer()
            elif word in ("ptr", "global", "shared", "const", "local"):
                continue  # attributes of a pointer parameter
            else:
                type_name = word
        name, count = self._next(), 1
        if self._take("["):
            count = 0 if self._peek() == "]" else self._integer()
            self._expect("]")
        initial: tuple[int, ...] = ()
        if self._take("="):
            if self._take("{"):
                values = [self._integer()]
                while self._take(","):
                    values.append(self._integer())
                self._expect("}")
                initial = tuple(values)
            else:
                initial = (self._initial_scalar(),)
        return Variable(space, type_name, name, count, max(align, size_of(type_name)), initial)

    def _initial_scalar(self) -> int:
        word = self._peek()
        if word[:2] in ("0f", "0d"):
            self._next()
            return int(word[2:], 16)
        return self._integer()

    def _params(self) -> list[Variable]:
        params: list[Variable] = []
        if self._take("("):
            while not self._take(")"):
                self._expect(".param")
                params.append(self._variable("param"))
                self._take(",")
        return params

    def _function(self, is_entry: bool) -> Function:
        results = [] if is_entry else self._params()
        name = self._next()
        function = Function(name, is_entry, self._params(), results, {})
        while self._peek().startswith("."):
            directive = self._next()[1:]
            values = []
            while self._peek() not in ("{", ";") and not self._peek().startswith("."):
                values.append(self._integer())
                self._take(",")
            function.directives[directive] = tuple(values)
        if self._take(";"):
            return function
        self._expect("{")
        function.body = list(self._body())
        return function

    # ---- function bodies

    def _body(self) -> Iterator[Statement]:
        depth = 1
        while True:
            word = self._peek()
            if word in ("{", "}"):
                self._next()
                depth += 1 if word == "{" else -1
                if depth == 0:
                    return
                yield Scope(word == "{")
            elif word == ";":
                self._next()
            elif word == ".loc":
                self._loc()
            elif word == ".pragma":
                self._next()
                self._next()
                self._expect(";")
            elif word == ".reg":
                self._next()
                yield self._registers()
            elif word in (".local", ".shared", ".param"):
                self._next()
                yield self._variable(word[1:])
                self._expect(";")
            elif self._peek(1) == ":":
                yield self._labelled()
            else:
                yield self._instruction()

    def _loc(self) -> None:
        start = self._tokens[self._at].line
        self._next()
        file, line = self._integer(), self._integer()
        callers = []
        while self._at < len(self._tokens) and self._tokens[self._at].line == start:
            if self._next() == "inlined_at":  # else: a column, or `function_name` and its label
                callers.append((self._integer(), self._integer()))
        if line:
            self._location = Location(file, line, tuple(callers))

    def _registers(self) -> Registers:
        type_name, names = self._next()[1:], []
        while True:
            name = self._next()
            if self._take("<"):
                names += [f"{name}{i}" for i in range(self._integer())]
                self._expect(">")
            else:
                names.append(name)
            if self._take(";"):
                return Registers(type_name, tuple(names))
            self._expect(",")

    def _labelled(self) -> Label | BranchTargets:
        name = self._next()
        self._expect(":")
        if not self._take(".branchtargets"):
            return Label(name)
        labels = [self._next()]
        while self._take(","):
            labels.append(self._next())
        self._expect(";")
        return BranchTargets(name, tuple(labels))

    def _instruction(self) -> Instruction:
        guard = None
        if self._take("@"):
            negated = self._take("!")
            guard = Register(self._next(), negated)
        line = self._line
        opcode, *modifiers = self._next().split(".")
        while self._take(":"):  # `ld.global.L1::no_allocate`
            self._expect(":")
            first, *rest = self._next().split(".")
            modifiers[-1] += "::" + first
            modifiers += rest
        operands: list[Operand] = []
        while not self._take(";"):
            operands.append(self._operand())
            if not self._take(","):
                self._expect(";")
                break
        return Instruction(opcode, tuple(modifiers), tuple(operands), guard, self._location, line)

    def _operand(self) -> Operand:
        operand = self._simple_operand()
        if self._take("|"):
            return Tuple((operand, self._simple_operand()))
        return operand

    def _simple_operand(self) -> Operand:
        for opening, closing in (("{", "}"), ("(", ")")):
            if self._take(opening):
                items = []
                while not self._take(closing):
                    items.append(self._operand())
                    self._take(",")
                return Tuple(tuple(items))
        if self._take("["):
            return self._memory()
        if self._take("!"):
            return Register(self._next(), negated=True)
        word = self._peek()
        if word == "-" or word[0].isdigit():
            return self._number()
        self._next()
        if word == "_":
            return Sink()
        return Register(word) if word.startswith("%") else Symbol(word)

    def _number(self) -> Integer | FloatBits:
        word = self._peek()
        if word[:2].lower() in ("0f", "0d"):
            self._next()
            return FloatBits(int(word[2:], 16), 32 if word[1].lower() == "f" else 64)
        return Integer(self._integer())

    def _memory(self) -> Memory:
        word = self._peek()
        base: Register | Symbol | Integer
        if word[0].isdigit():
            base = Integer(self._integer())
        else:
            self._next()
            base = Register(word) if word.startswith("%") else Symbol(word)
        offset = 0
        if self._take("+") or self._peek() == "-":
            offset = self._integer()
        self._expect("]")
        return Memory(base, offset)
