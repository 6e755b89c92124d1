"""`engine chat` as a process, against a server whose answers the test writes."""

import asyncio
import os
import pty
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from engine.cli.chat.session import Numbers
from engine.errors import OverCapacity
from engine.request.params import SamplingParams
from rpc.proto.engine.v1 import engine_pb2 as pb
from tests.rpc.conftest import Served, Serving
from tests.rpc.fake_engine import Submission

ROOT = Path(__file__).parent.parent.parent


class Chatting:
    """A chat process with pipes in place of a terminal, and the server it talks to."""

    def __init__(self, served: Served, process: asyncio.subprocess.Process) -> None:
        self.served, self.process = served, process

    async def say(self, line: str) -> Submission:
        """Type a line and wait for the request it makes."""
        self.served.engine.live.clear()  # which does not notice that an answer has ended
        self.type(line)
        return await self.served.engine.submissions.get()

    def type(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())

    async def shown(self) -> str:
        """The next line on stdout."""
        assert self.process.stdout is not None
        return (await self.process.stdout.readline()).decode()

    async def note(self) -> str:
        """The next line on stderr."""
        assert self.process.stderr is not None
        return (await self.process.stderr.readline()).decode().rstrip("\n")

    async def leave(self) -> tuple[int | None, str, str]:
        """End of input; exit code, and what was not read yet of stdout and stderr."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        out, err = await self.process.communicate()
        return self.process.returncode, out.decode(), err.decode()


@asynccontextmanager
async def chatting(serving: Serving, *arguments: str) -> AsyncIterator[Chatting]:
    async with serving() as served:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "engine", "chat", "--address", f"127.0.0.1:{served.port}", *arguments,
            cwd=ROOT, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            chat = Chatting(served, process)
            assert await chat.note() == "tiny on cpu: test, at most 2048 tokens; /help"
            yield chat
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


def prompt(submission: Submission) -> str:
    return "".join(map(chr, submission.prompt))


async def test_turns_build_on_each_other(serving: Serving) -> None:
    async with chatting(serving, "--system", "S", "--temperature", "0", "--stop", "x") as chat:
        first = await chat.say("hello")
        assert prompt(first) == "<system>S<user>hello<assistant>"
        assert first.params == SamplingParams(max_tokens=1024, temperature=0.0, stop=["x"])
        first.push("**bo", [1])
        first.push("ld** & [red]plain[/red]\n", [2])
        first.finish("end", [3])
        assert [await chat.shown() for _ in range(2)] == ["**bold** & [red]plain[/red]\n", "end\n"]
        assert "31 prompt tokens, 0 cached · 3 tokens · first after " in await chat.note()

        second = await chat.say("more")
        answer = "**bold** & [red]plain[/red]\nend"
        assert prompt(second) == f"<system>S<user>hello<assistant>{answer}<user>more<assistant>"
        second.push("x", [1], num_cached_tokens=16)
        second.finish(finish_reason="length")
        assert await chat.shown() == "x\n"
        note = await chat.note()
        assert ", 16 cached · 1 tokens" in note
        assert note.endswith("cut at the longest allowed (--max-tokens, or the model's limit)")
        assert await chat.leave() == (0, "", "")


async def test_commands(serving: Serving, tmp_path: Path) -> None:
    async with chatting(serving) as chat:
        (await chat.say("one")).finish("1", [1])
        assert (await chat.shown(), "tokens" in await chat.note()) == ("1\n", True)
        chat.type("/undo")
        assert await chat.note() == "undone: one"
        chat.type("")  # nothing to send
        chat.type("/system Be brief.")
        assert await chat.note() == "system message set"
        submission = await chat.say("/etc/hosts?")
        assert prompt(submission) == "<system>Be brief.<user>/etc/hosts?<assistant>"
        submission.finish("2", [1])
        assert (await chat.shown(), "tokens" in await chat.note()) == ("2\n", True)
        chat.type(f"/save {tmp_path / 'chat.json'}")
        assert await chat.note() == f"saved 3 messages to {tmp_path / 'chat.json'}"
        chat.type("/quit")
        assert await chat.leave() == (0, "", "")


async def test_ctrl_c_ends_the_answer_and_keeps_the_session(serving: Serving) -> None:
    async with chatting(serving) as chat:
        (await chat.say("one")).push("begun\n", [1])
        assert await chat.shown() == "begun\n"
        chat.process.send_signal(signal.SIGINT)
        await chat.served.engine.aborts.get()
        assert (await chat.shown(), await chat.note()) == ("\n", "stopped")
        (second := await chat.say("two")).finish("2", [1])
        assert prompt(second) == "<user>one<assistant>begun\n<user>two<assistant>"
        assert await chat.shown() == "2\n"
        await chat.note()
        assert await chat.leave() == (0, "", "")


async def test_a_refused_turn_is_forgotten(serving: Serving) -> None:
    async with chatting(serving) as chat:
        chat.served.engine.refusal = OverCapacity("too many requests wait")
        chat.type("one")
        assert (await chat.shown(), await chat.note()) == ("\n", "RESOURCE_EXHAUSTED: too many requests wait")
        chat.served.engine.refusal = None
        (second := await chat.say("two")).finish("2", [1])
        assert prompt(second) == "<user>two<assistant>"
        assert await chat.shown() == "2\n"
        await chat.note()
        assert (await chat.leave())[0] == 0


async def test_no_server_is_a_failure_in_one_line() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "engine", "chat", "--address", "127.0.0.1:1"),
        cwd=ROOT, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate(b"hi\n")
    assert (process.returncode, out) == (1, b"")
    assert err.startswith(b"engine: error: UNAVAILABLE: ") and err.count(b"\n") == 1


@pytest.mark.parametrize(
    ("numbers", "line"),
    [
        (Numbers(1.0), "no answer"),
        (
            Numbers(1.0, 1.25, 3.25, pb.Usage(prompt_tokens=40, completion_tokens=21, cached_tokens=32)),
            "40 prompt tokens, 32 cached · 21 tokens · first after 0.25 s · 10.0 tok/s",
        ),
        (
            Numbers(1.0, 1.5, 1.5, pb.Usage(prompt_tokens=4, completion_tokens=1)),
            "4 prompt tokens, 0 cached · 1 tokens · first after 0.50 s",
        ),
    ],
)
def test_numbers_of_a_turn(numbers: Numbers, line: str) -> None:
    assert numbers.line() == line


IN_A_TERMINAL = """
import os, sys
os.close(os.open(os.ttyname(0), os.O_RDWR))  # a session's first terminal becomes its own: Ctrl-C is a signal
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


class Terminal:
    """A chat process on a terminal of its own; `until` reads what it shows."""

    def __init__(self, port: int) -> None:
        self._fd, theirs = pty.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-c", IN_A_TERMINAL, "-m", "engine", "chat", "--address", f"127.0.0.1:{port}"],
            cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "60", "LINES": "20"},
        )  # fmt: skip
        os.close(theirs)
        self._shown = b""

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    async def until(self, text: str) -> str:
        """What is shown up to and with `text`; waits for it."""
        while text.encode() not in self._shown:
            try:
                piece = await asyncio.to_thread(os.read, self._fd, 65536)
            except OSError:  # the process has ended
                piece = b""
            assert piece, self._shown
            self._shown += piece
        before, found, self._shown = self._shown.partition(text.encode())
        return (before + found).decode()

    async def rests(self) -> None:
        """Wait until it sleeps: a Ctrl-C between a prompt and the `select` after it is seen at the next signal only."""
        stat = Path(f"/proc/{self._process.pid}/stat")
        while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "S":
            await asyncio.sleep(0)

    async def exit_code(self) -> int:
        return await asyncio.to_thread(self._process.wait)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._fd)


async def test_on_a_terminal(serving: Serving) -> None:
    async with serving() as served:
        terminal = Terminal(served.port)
        try:
            await terminal.until("/help")
            await terminal.until("> ")
            terminal.type("hellp\x7fo\r")  # edited before it is sent
            submission = await served.engine.submissions.get()
            assert prompt(submission) == "<user>hello<assistant>"
            submission.push("# Title\n\nsome **bold", [1])
            await terminal.until("bold")  # growing, before its end is known
            submission.finish("** text", [2])
            shown = await terminal.until("tokens")
            assert "\x1b[1mbold\x1b[0m text" in shown
            await terminal.until("> ")

            terminal.type("\x1b[A\r")  # the line before, from the history
            submission = await served.engine.submissions.get()
            assert prompt(submission).endswith("<user>hello<assistant>")
            submission.push("partial", [1])
            await terminal.until("partial")
            terminal.type("\x03")  # Ctrl-C
            await served.engine.aborts.get()
            await terminal.until("stopped")
            await terminal.until("> ")
            terminal.type("unfinished")
            await terminal.until("unfinished")
            await terminal.rests()
            terminal.type("\x03")  # at the prompt it drops the line
            await terminal.until("> ")
            terminal.type("\x04")  # Ctrl-D
            assert await terminal.exit_code() == 0
        finally:
            terminal.close()
