"""FakeEngine: `engine.engine.Engine` as the server sees it, driven by the test instead of a model.

What the server asked for is in queues that the test awaits; what the engine would do (finish
loading, produce a delta, run out of grace, fail) the test triggers. So no test sleeps.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry

from engine.errors import EngineError, EngineStopped, InvalidRequest
from engine.observe.records import IterationRecord, Profile, RequestRecord
from engine.observe.snapshot import EngineStats, Snapshot, TenantStats
from engine.request.outputs import Delta
from engine.request.params import SamplingParams
from engine.serving.stream import OutputChannel, OutputStream
from engine.text.chat_renderer import ChatRenderer
from loader.generation import GenerationConfig

INFO = SimpleNamespace(
    model="/models/tiny", served_model_name="tiny",
    served_model_names=("tiny",), architecture="LlamaForCausalLM", max_model_len=2048,
    vocab_size=49152, dtype="bfloat16", device="cpu: test", num_blocks=77, block_size=16, version="0.1.0",
)  # fmt: skip


STATS = EngineStats(
    state="serving", num_running=3, num_waiting=4, kv_cache_usage=0.25, num_blocks=77, num_free_blocks=50,
    num_cached_blocks=8, prefix_cache_queries=90, prefix_cache_hits=32, prompt_tokens=100, generation_tokens=2**40,
    num_preemptions=2,
    tenants=(
        TenantStats(tenant="acme", num_running=1, num_waiting=4),
        TenantStats(tenant="beta", num_running=2, num_waiting=0),
    ),
)  # fmt: skip


def profile(num_iterations: int, *request_ids: str) -> Profile:
    """A recording of iterations of 1 ms each, and of requests that ended with the last."""
    iterations = [
        IterationRecord(i / 1000, 0.0, (0.000125,) * 8, i + 1, i, 1, 0, 1, 1, 1, 0, 0.5, 1.0, 0, 0.0005)
        for i in range(num_iterations)
    ]
    end = num_iterations / 1000
    return Profile(
        0.0, end, iterations, [RequestRecord(r, 0.0, 0.0, 0.001, end, end, 5, 0, 4, 4, "stop") for r in request_ids]
    )


@dataclass
class Submission:
    """One accepted request; the test writes its output."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    channel: OutputChannel
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    client: str = ""

    def push(self, text: str = "", ids: Sequence[int] = (), **more: Any) -> None:
        self.channel.push(Delta(text=text, token_ids=tuple(ids), **{"index": 0, **more}))

    def finish(self, text: str = "", ids: Sequence[int] = (), **more: Any) -> None:
        self.push(text, ids, **{"finish_reason": "stop", **more})


ENGINE: Any = object  # so that a double may stand where an Engine is asked for


class FakeEngine(ENGINE):
    """`text` is tokenised to its code points, so that a test can read a prompt."""

    def __init__(self, config: object = None) -> None:
        self.state = "starting"
        self.info = INFO
        self.checkpoint = SimpleNamespace(
            generation=GenerationConfig(eos_token_ids=(2,)),
            chat_templates={},
            chat_template=None,
            special_tokens={"bos_token": "<s>"},
        )
        self.chat = ChatRenderer({}, {})
        self.is_traced = False
        self.tokenizer = SimpleNamespace(token_text=chr)
        self.metrics = CollectorRegistry()
        self.chat_messages: list[dict[str, str]] = []
        self.chat_options: dict[str, Any] = {}
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.load_error: EngineError | None = None
        self.refusal: Exception | None = None
        self.submissions: asyncio.Queue[Submission] = asyncio.Queue()
        self.aborts: asyncio.Queue[str] = asyncio.Queue()
        self.live: dict[str, Submission] = {}
        self.draining = asyncio.Event()
        self.drained = asyncio.Event()
        self.grace: float | None = None
        self.grace_over = asyncio.Event()
        self.all_ended = asyncio.Event()
        self.num_iterations = 0
        self.has_work = False
        self.current_stats = STATS
        self.current_snapshot: Snapshot | None = None
        self.num_snapshots = 0
        self.profile: Profile | None = None
        self.failure: asyncio.Future[Exception] = asyncio.get_event_loop().create_future()

    def check_model(self) -> None:
        """There is one."""

    async def __aenter__(self) -> "FakeEngine":
        await self.may_load.wait()
        if self.load_error is not None:
            raise self.load_error
        self.state = "serving"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.state = "stopped"
        self._end_all()

    def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        tenant: str = "",
        client: str = "",
        cache_salt: str = "",
    ) -> OutputStream:
        if self.refusal is not None:
            raise self.refusal
        if self.state != "serving":
            raise EngineStopped(f"the engine is {self.state}")
        request_id = request_id or f"auto-{self.submissions.qsize()}"
        if request_id in self.live:
            raise InvalidRequest("request_id", f"{request_id!r} is live already")
        submission = Submission(
            request_id, list(prompt), params, OutputChannel(params.n), priority, tenant, cache_salt, client
        )
        self.live[request_id] = submission
        self.submissions.put_nowait(submission)
        return OutputStream(request_id, list(prompt), submission.channel, self._dropped)

    async def compile_grammar(self, params: SamplingParams) -> None:
        pass

    def abort(self, request_id: str) -> bool:
        submission = self.live.pop(request_id, None)
        if submission is not None:
            submission.finish(finish_reason="abort")
        return submission is not None

    async def stats(self) -> EngineStats:
        return self.current_stats

    async def snapshot(self) -> Snapshot | None:
        self.num_snapshots += 1
        return self.current_snapshot

    def start_profile(self) -> None:
        self.profile = profile(0)

    def stop_profile(self) -> Profile:
        stopped, self.profile = self.profile or profile(0), None
        return stopped

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return ([1] if add_special_tokens else []) + [ord(c) for c in text]

    async def detokenize(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))

    async def render_chat(
        self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool = True, **options: Any
    ) -> list[int]:
        self.chat_messages, self.chat_options = list(messages), options
        text = "".join(f"<{m['role']}>{m['content']}" for m in messages)
        return [ord(c) for c in text + ("<assistant>" if add_generation_prompt else "")]

    async def drain(self, grace: float) -> None:
        self.state, self.grace = "draining", grace
        self.draining.set()
        over = asyncio.ensure_future(self.grace_over.wait())
        ended = asyncio.ensure_future(self._ended())
        await asyncio.wait((over, ended), return_when=asyncio.FIRST_COMPLETED)
        over.cancel()
        ended.cancel()
        self._end_all()
        self.drained.set()

    async def wait_failed(self) -> Exception:
        return await asyncio.shield(self.failure)

    def fail(self, error: EngineError) -> None:
        """The loop dies of `error`."""
        self.state = "failed"
        for submission in self.live.values():
            submission.channel.fail(error)
        self.failure.set_result(error)

    async def _ended(self) -> None:
        if any(not s.channel.ended for s in self.live.values()):
            await self.all_ended.wait()

    def _end_all(self) -> None:
        for submission in self.live.values():
            submission.channel.fail(EngineStopped("the server is shutting down"))
        self.live.clear()

    def _dropped(self, request_id: str) -> None:
        if self.live.pop(request_id, None) is not None:
            self.aborts.put_nowait(request_id)
