"""World: random histories on the real loop over the fake device, every stream checked against a plain list.

One world is one configuration and one seed. `play` takes random events until it has done enough, drains,
and then asks for the books: no request, block or row may be left. Read next: `tests/engine/fake_device.py`.
"""

import asyncio
import gc
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engine.errors import StepFault
from engine.kv.groups import KVGroup
from engine.request.outputs import Delta
from engine.serving.stream import OutputStream
from tests.engine.fake_device import expected, ranked
from tests.engine.server import serving
from tests.engine.test_choices import by_choice, naive_beam_search

GROUPS = ((KVGroup(None, (0,)),), (KVGroup(None, (0,)), KVGroup(5, (1,))))
AUDIT_EVERY = 16


@dataclass
class Request:
    """A request in flight, what it was asked and what it has said so far."""

    stream: OutputStream | None
    prompt: list[int]
    max_tokens: int
    params: dict[str, Any]
    is_aborted: bool = False
    deltas: list[Delta] = field(default_factory=list)
    reader: asyncio.Task[None] | None = None
    error: StepFault | None = None

    async def read(self, patience: Callable[[], int]) -> None:
        """Take everything, after `patience()` turns of the event loop each time."""
        stream = self.stream
        assert stream is not None
        try:
            while True:
                for _ in range(patience()):
                    await asyncio.sleep(0)
                delta = await stream.read()
                if delta is None:
                    return
                self.deltas.append(delta)
        except StepFault as error:
            self.error = error

    def wanted(self) -> dict[int, list[int]]:
        """The output of each choice if nothing ends it early, from plain lists."""
        n, width = self.params.get("n", 1), self.params.get("best_of") or self.params.get("n", 1)
        if self.params.get("use_beam_search"):
            found = naive_beam_search(self.prompt, width, self.max_tokens, set(self.stops), 1.0, exhaustive=False)
            return {i: ids for i, (_, ids) in enumerate(found[:n])}
        outputs = [self._until_stop(expected(self.prompt, self.max_tokens, choice)) for choice in range(width)]
        if width > n:
            outputs.sort(key=lambda ids: self._score(ids), reverse=True)
        return dict(enumerate(outputs[:n]))

    @property
    def stops(self) -> list[int]:
        return self.params.get("stop_token_ids", [])

    def _until_stop(self, ids: list[int]) -> list[int]:
        ends = [i for i, token in enumerate(ids) if token in self.stops]
        return ids[: ends[0] + 1] if ends else ids

    def _score(self, ids: list[int]) -> float:
        steps = enumerate(ids)
        return sum(dict(ranked([*self.prompt, *ids[:i]])).get(token, -9.0) for i, token in steps)

    def check(self) -> None:
        """A surviving stream is exact; one that was ended holds the beginning of the truth."""
        wanted, found = self.wanted(), by_choice(self.deltas)
        ends = [d.index for d in self.deltas if d.finish_reason is not None]
        if self.error is None:
            assert sorted(ends) == sorted(wanted), "every choice ends once"
        aborted = {d.index for d in self.deltas if d.finish_reason == "abort"}
        assert self.is_aborted or not aborted
        for index, ids in found.items():
            if index in aborted or self.error is not None:
                assert ids == wanted[index][: len(ids)]
            else:
                assert ids == wanted[index]
        self._check_prompt_logprobs()

    def _check_prompt_logprobs(self) -> None:
        maps = [d.prompt_logprobs for d in self.deltas if d.prompt_logprobs is not None]
        if self.params.get("prompt_logprobs") is not None and not self.is_aborted and self.error is None:
            (only,) = maps
            assert [m and next(iter(m)) for m in only] == [None, *self.prompt[1:]]
        assert len(maps) <= 1


class World:
    """A server with a random configuration, and the requests of a random history."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        block_size = rng.choice([1, 2, 4])
        self.rows = rng.choice([1, 2, 4, 6])
        num_blocks = rng.randint(8, 28) * (4 // block_size)
        self.limit = rng.randint(num_blocks // 2, num_blocks) * block_size
        self.settings: dict[str, Any] = {
            "num_blocks": num_blocks,
            "block_size": block_size,
            "max_num_seqs": self.rows,
            "groups": rng.choice(GROUPS),
            "caching": rng.random() < 0.8,
            "threshold": rng.choice([0, 0, 1, 3]),
            "budget": rng.randint(self.rows, 40),
        }
        self.requests: list[Request] = []
        self.controls: list[asyncio.Task[Any]] = []
        self.num_events = 0

    async def play(self, num_events: int) -> None:
        """Take `num_events` random events, drain and check everything."""
        async with serving(**self.settings, queue=10_000, free_running=False) as self.server:
            while self.num_events < num_events and not self.server.task.done():
                await self._event()
                self.num_events += 1
                if self.num_events % AUDIT_EVERY == 0:
                    self._control(self.server.roster.audit)
            await self._quiesce()
        for request in self.requests:
            request.check()

    async def _quiesce(self) -> None:
        self._control(self.server.loop.drain)
        self.server.device.open(10**9)
        readers = [r.reader for r in self.requests if r.reader is not None]
        async with asyncio.timeout(10):
            await asyncio.gather(*readers)
            assert await self.server.is_clean()
            for found in await asyncio.gather(*self.controls):
                assert not found, "the audit found nothing"

    def _control(self, action: Callable[[], Any]) -> None:
        """Ask the loop for something, without waiting: it may be waiting for a step itself."""
        self.controls.append(asyncio.create_task(self.server.inbox.control(action)))

    async def _event(self) -> None:
        kinds = {
            self._submit: 20,
            self._let_steps_run: 50,
            self._turn: 20,
            self._abort: 6,
            self._drop: 4,
            self._cancel_reader: 3,
            self._reset: 2,
            self._fail_a_step: 0.5,
        }
        (kind,) = self.rng.choices(list(kinds), list(kinds.values()))
        await kind()

    async def _let_steps_run(self) -> None:
        device = self.server.device
        device.open(max(device.opened, device.plans[-1].step if device.plans else 0) + self.rng.randint(-1, 2))
        await self._turn()

    async def _turn(self) -> None:
        for _ in range(self.rng.randint(1, 6)):
            await asyncio.sleep(0)

    async def _submit(self) -> None:
        rng = self.rng
        if sum(r.reader is not None and not r.reader.done() for r in self.requests) > 4 * self.rows + 4:
            return await self._let_steps_run()
        prompt = [rng.randint(0, 2)] * rng.randint(0, 12) + [rng.randint(0, 3) for _ in range(rng.randint(1, 8))]
        prompt = prompt[: self.limit - 1]
        max_tokens = rng.randint(0, min(14, self.limit - len(prompt)))
        params = self._random_params(prompt, max_tokens)
        tenant, priority = rng.choice("aaab"), rng.choice([0, 0, 0, 1, 2])
        stream = self.server.generate(prompt, max_tokens, tenant=tenant, priority=priority, **params)
        request = Request(stream, prompt, max_tokens, params)
        slowness = rng.choice([0, 0, 1, 30])
        request.reader = asyncio.create_task(request.read(lambda: slowness))
        self.requests.append(request)

    def _random_params(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        rng, params = self.rng, dict[str, Any]()
        if rng.random() < 0.2:
            params["prompt_logprobs"] = 0
        if max_tokens == 0:
            return params
        if rng.random() < 0.3:
            params["stop_token_ids"] = [rng.choice(expected(prompt, max_tokens))]
        width = rng.randint(1, min(4, self.rows))
        match rng.randint(0, 5):
            case 0:
                params["n"] = width
            case 1:
                params |= {"n": rng.randint(1, width), "best_of": width}
            case 2:
                params |= {"n": rng.randint(1, width), "best_of": width, "use_beam_search": True, "temperature": 0}
        return params

    def _live(self) -> Request | None:
        live = [r for r in self.requests if r.reader is not None and not r.reader.done()]
        return self.rng.choice(live) if live else None

    async def _abort(self) -> None:
        if (request := self._live()) is not None and request.stream is not None:
            request.is_aborted = True
            request.stream.cancel()

    async def _cancel_reader(self) -> None:
        if (request := self._live()) is not None and request.reader is not None:
            request.reader.cancel()
            await asyncio.wait([request.reader])
            self._forget(request)

    async def _drop(self) -> None:
        """A stream nobody reads goes out of scope."""
        prompt = [self.rng.randint(0, 2)] * self.rng.randint(1, self.limit - 1)
        stream = self.server.generate(prompt, self.rng.randint(1, self.limit - len(prompt)))
        await self._turn()
        del stream
        if self.rng.random() < 0.01:
            gc.collect()

    async def _reset(self) -> None:
        self._control(self.server.roster.kv.reset_prefix_cache)

    async def _fail_a_step(self) -> None:
        plans = self.server.device.plans
        self.server.device.faults[plans[-1].step + 2 if plans else 1] = StepFault("scripted")

    def _forget(self, request: Request) -> None:
        self.requests.remove(request)
