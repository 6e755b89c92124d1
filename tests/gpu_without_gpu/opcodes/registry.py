"""The table of handlers, and the modifiers of one instruction as they are consumed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.gpu_without_gpu.ptx import Instruction
    from tests.gpu_without_gpu.translate import FunctionWriter

ROUNDINGS = ("rn", "rz", "rm", "rp")


class Modifiers:
    """The modifiers of an instruction; handlers take what they know, `finish` complains about the rest."""

    def __init__(self, writer: FunctionWriter, ins: Instruction) -> None:
        self._writer = writer
        self._left = list(ins.modifiers)

    def type(self) -> str:
        """The last modifier: the type of the operation."""
        if not self._left:
            raise self._writer.error("missing type")
        return self._left.pop()

    def flag(self, *names: str) -> bool:
        """Whether one of `names` is there; it is taken."""
        return self.choice(*names) is not None

    def choice(self, *names: str) -> str | None:
        """The first modifier that is one of `names`; it is taken."""
        for name in self._left:
            if name in names:
                self._left.remove(name)
                return name
        return None

    def require(self, *names: str) -> str:
        found = self.choice(*names)
        if found is None:
            raise self._writer.error(f"expected one of {', '.join(names)}")
        return found

    def take_all(self, *names: str) -> None:
        while self.flag(*names):
            pass

    def finish(self) -> None:
        if self._left:
            raise self._writer.error(f"unknown modifier .{' .'.join(self._left)}")


Handler = Callable[["FunctionWriter", "Instruction", Modifiers], str]
HANDLERS: dict[str, Handler] = {}


def opcode(*names: str) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        for name in names:
            assert name not in HANDLERS, name
            HANDLERS[name] = handler
        return handler

    return register
