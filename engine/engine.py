"""Engine: a model being served. Opens the checkpoint, plans memory, starts the device and the loop.

Everything that can be wrong with a request is refused in `generate`, synchronously and by field, before it
is queued. Everything after that happens in the loop's task. Read next: `engine/serving/factory.py`, `engine/loop.py`.
"""

import asyncio
import gc
import logging
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self, Unpack
from weakref import WeakValueDictionary

from prometheus_client import CollectorRegistry

from engine.config import EngineConfig
from engine.devices import choose_token_budget, memory_facts, open_device, select_device
from engine.devices.memory import MemoryLedger, plan_memory
from engine.devices.protocol import Device
from engine.errors import ConfigError, EngineStopped, InvalidRequest
from engine.grammar.masks import Masks
from engine.kv.events import BlockFeed, Stored
from engine.kv.groups import kv_groups
from engine.kv.manager import KVManager
from engine.loop import EngineLoop
from engine.observe.counters import Counters
from engine.observe.model_info import ModelInfo, model_info
from engine.observe.observer import Observer
from engine.observe.prometheus import EngineCollector
from engine.observe.records import Profile, Records
from engine.observe.snapshot import EngineStats, Snapshot, engine_stats, take_snapshot
from engine.observe.spans import TRACE_HEADERS, RequestSpans
from engine.request.params import SamplingParams
from engine.schedule.roster import Roster
from engine.schedule.scheduler import Scheduler
from engine.serving.beam import BeamRequest
from engine.serving.factory import SequenceFactory
from engine.serving.inbox import Inbox
from engine.serving.live_request import LiveRequest
from engine.serving.stream import OutputChannel, OutputStream
from engine.text.chat import ChatOptions
from engine.text.chat_renderer import ChatRenderer
from engine.text.detokenizer import decode
from engine.text.model import TextModel, open_model
from engine.text.tokenizer import TextTokenizer, need_tokenizer
from loader.checkpoint import Checkpoint
from loader.errors import shown

logger = logging.getLogger(__name__)

LONG_CHAT = 128
"""Messages, tools and documents above which a chat is rendered off the loop; so many take about 1 ms."""

LONG_TEXT = 8192
"""Characters (ids) above which (de)tokenizing runs off the loop; 8 KiB take about 3 ms here."""

COMPILE_SECONDS = 10.0
"""How long a grammar may take to compile; the worst one found took 0.7 s."""

EngineState = Literal["starting", "serving", "draining", "stopped", "failed"]


class Engine:
    """`async with Engine(config) as engine:` serves until the block ends.

    Attributes:
        metrics: registry of the engine's metrics; empty until it has started.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.info: ModelInfo
        self.ledger: MemoryLedger
        self.metrics = CollectorRegistry()
        endpoint = config.otlp_traces_endpoint
        self._spans = None if endpoint is None else RequestSpans(endpoint)
        self._checkpoint: Checkpoint
        self._model: TextModel | None = None
        self._tokenizer: TextTokenizer | None = None
        self._chat: ChatRenderer
        self._device: Device
        self._loop: EngineLoop | None = None
        self._inbox: Inbox
        self._task: asyncio.Task[None]
        self._channels: WeakValueDictionary[str, OutputChannel] = WeakValueDictionary()
        self._factory: SequenceFactory
        self._compiling = asyncio.Semaphore(2)

    def check_model(self) -> None:
        """Read everything but the weights now, before anything listens. Raises CheckpointError and ConfigError."""
        self._model = open_model(self.config)

    # -- life -------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._open_checkpoint()
        self._device = await open_device(
            self.config,
            self._checkpoint,
            num_blocks=self.ledger.num_blocks,
            max_model_len=self.ledger.max_model_len,
        )
        self._inbox = Inbox(
            self.config.max_queued_requests,
            max_queued_requests_per_tenant=self.config.max_queued_requests_per_tenant,
        )
        self.info = model_info(self.config, self._checkpoint, self.ledger, self._device.info)
        scheduler = self._make_scheduler()
        observer = self._make_observer(scheduler)
        self._loop = EngineLoop(scheduler, self._device, self._inbox, observer, self._make_masks())
        self._task = asyncio.create_task(self._loop.run(), name="engine-loop")
        gc.freeze()  # what is there now stays: a full collection would walk all of it, 30 ms in the middle of a step
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        try:
            self._task.cancel()
            await asyncio.wait([self._task])
        finally:
            gc.unfreeze()
            await self._device.close()
            if self._spans is not None:
                await asyncio.to_thread(self._spans.close)

    def _open_checkpoint(self) -> None:
        config = self.config
        kind = select_device(config.device)
        model = self._model or open_model(config)
        checkpoint = self._checkpoint = model.checkpoint
        self._tokenizer, self._chat = model.tokenizer, model.chat
        if model.tokenizer is None:
            logger.warning(
                "%s has no tokenizer.json: prompts and answers are token ids, chats are refused", config.model
            )
        config = self.config = choose_token_budget(kind, config, checkpoint)
        facts = memory_facts(kind, config, checkpoint)
        self.ledger = plan_memory(config, facts, checkpoint.decoder.max_position_embeddings)
        if not config.enable_chunked_prefill and self.ledger.max_model_len > config.token_budget:
            raise ConfigError(
                f"max_num_batched_tokens: {config.token_budget} is less than max_model_len "
                f"{self.ledger.max_model_len}, which needs enable_chunked_prefill"
            )
        logger.info("%s", self.ledger)
        logger.info("steps of at most %d tokens", config.token_budget)
        self._factory = SequenceFactory(config, checkpoint, self.ledger.max_model_len, self._tokenizer)

    def _make_scheduler(self) -> Scheduler:
        config = self.config
        kv = KVManager(
            kv_groups(self._checkpoint.decoder.layer_windows),
            self.ledger.num_blocks,
            config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        return Scheduler(
            Roster(kv, config.max_num_seqs),
            max_num_batched_tokens=config.token_budget,
            enable_chunked_prefill=config.enable_chunked_prefill,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
        )

    def _make_observer(self, scheduler: Scheduler) -> Observer:
        counters = Counters(self.ledger.max_model_len)
        cache_config = {
            "block_size": self.config.block_size,
            "cache_dtype": self.config.kv_cache_dtype,
            "enable_prefix_caching": self.config.enable_prefix_caching,
            "num_gpu_blocks": self.info.num_blocks,
            "num_cpu_blocks": 0,
        }
        self.metrics.register(
            EngineCollector(counters, scheduler, model_name=self.info.served_model_name, cache_config=cache_config)
        )
        spans = None if self._spans is None else partial(self._spans.add, model=self.info.served_model_name)
        return Observer(scheduler.roster, counters, spans=spans)

    def _make_masks(self) -> Masks | None:
        grammars = self._factory.grammars
        if grammars is None:
            return None
        return Masks(self.config.max_num_seqs, self._checkpoint.decoder.vocab_size, grammars.vocab_size)

    @property
    def is_traced(self) -> bool:
        """Whether each request leaves a span."""
        return self._spans is not None

    @property
    def checkpoint(self) -> Checkpoint:
        """What the model's folder says; there once the engine has started."""
        return self._checkpoint

    @property
    def state(self) -> EngineState:
        """Where the engine is in its life."""
        return "starting" if self._loop is None else self._loop.state

    async def wait_failed(self) -> BaseException:
        """Return what broke the engine, if anything ever does."""
        await asyncio.wait([self._task])
        error = None if self._task.cancelled() else self._task.exception()
        return error or EngineStopped("the engine has stopped")

    async def drain(self, grace: float) -> None:
        """Take no more requests; live ones have `grace` seconds to finish, then end with EngineStopped."""
        loop = self._serving_loop()
        try:
            async with asyncio.timeout(grace):
                await self._inbox.control(loop.drain)
                await loop.requests.is_empty.wait()
        except EngineStopped:
            return  # it has ended already, and every request with it
        except TimeoutError:
            # Not through the inbox: a device that hangs must not hold up the end.
            loop.end_with(EngineStopped(f"the engine is draining and the grace time of {grace:g} s is over"))
            self._task.cancel()
            await asyncio.wait([self._task])

    # -- requests ---------------------------------------------------------------------------

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        tenant: str = "",
        client: str = "",
        cache_salt: str = "",
    ) -> OutputStream:
        """Queue a request and return the stream of its output.

        Args:
            prompt: text, tokenized here (`tokenize` first when it is long), or token ids.
            params: a grammar in it is compiled here (`compile_grammar` first, always).
            priority: lower goes first.
            tenant: whose share this counts against; its cached prefixes are its own.
            client: whose share it counts against where there is no tenant, e.g. an address.
            cache_salt: cached prefixes are shared only with requests that have the same.

        Raises:
            InvalidRequest: it can never be served; names the field.
            OverCapacity: too many requests wait, of all or of the tenant.
            EngineStopped: the engine takes no more work.
        """
        loop = self._serving_loop()
        if loop.state != "serving":
            raise EngineStopped(f"the engine is {loop.state}")
        request_id = request_id or uuid.uuid4().hex
        if (channel := self._channels.get(request_id)) is not None and not channel.ended:
            raise InvalidRequest("request_id", f"{shown(request_id)} is in use")
        token_ids = self._factory.prompt_token_ids(prompt, params)
        sequences = self._factory.sequences(
            request_id, token_ids, params, priority=priority, tenant=tenant, client=client, cache_salt=cache_salt
        )
        channel = OutputChannel(params.n, self.config.stream_interval)
        kind = BeamRequest if params.use_beam_search else LiveRequest
        live = kind(sequences, channel, self._tokenizer)
        live.trace_headers = TRACE_HEADERS.get()
        self._inbox.submit(live)
        self._channels[request_id] = channel
        return OutputStream(request_id, token_ids, channel, self._inbox.abort)

    async def compile_grammar(self, params: SamplingParams) -> None:
        """Compile the request's structured_outputs, if it has any, off the loop, for `generate` to find it compiled.

        Raises InvalidRequest naming the field.
        """
        wanted, grammars = params.structured_outputs, self._factory.grammars
        if wanted is None or grammars is None or grammars.has(wanted):
            return
        try:
            async with asyncio.timeout(COMPILE_SECONDS), self._compiling:
                await asyncio.to_thread(grammars.compile, wanted)
        except TimeoutError as error:
            reason = f"was not compiled within {COMPILE_SECONDS:g} s"
            raise InvalidRequest(f"structured_outputs.{wanted.kind}", reason) from error

    def abort(self, request_id: str) -> bool:
        """Abort a request; its stream ends with finish reason "abort". False if it is not live."""
        channel = self._channels.get(request_id)
        if channel is None or channel.ended:
            return False
        self._inbox.abort(request_id)
        return True

    async def reset_prefix_cache(self, tenant: str | None = None) -> bool:
        """Forget every cached prefix, or those of one tenant; what is in use stays with its requests."""
        loop = self._serving_loop()
        await self._inbox.control(lambda: loop.roster.kv.reset_prefix_cache(tenant))
        return True

    async def follow_blocks(self, feed: BlockFeed) -> list[Stored]:
        """Tell `feed` what enters and leaves the prefix cache from now on; returns what is there now."""
        loop = self._serving_loop()
        contents: list[Stored] = await self._inbox.control(lambda: loop.roster.kv.follow(feed))
        return contents

    async def stats(self) -> EngineStats:
        """Numbers between two iterations. Raises EngineStopped when there are no more iterations."""
        loop = self._serving_loop()
        stats: EngineStats = await self._inbox.control(
            lambda: engine_stats(loop.state, loop.roster, loop.observer.counters)
        )
        return stats

    async def snapshot(self) -> Snapshot:
        """Blocks, sequences and iterations at one moment. Raises EngineStopped as `stats` does."""
        loop = self._serving_loop()
        snapshot: Snapshot = await self._inbox.control(lambda: take_snapshot(loop.state, loop.roster, loop.observer))
        return snapshot

    @property
    def num_iterations(self) -> int:
        """Turns of the loop so far. It stands still while the engine is idle, and while it hangs."""
        return 0 if self._loop is None else self._loop.num_iterations

    @property
    def has_work(self) -> bool:
        """There is something for the next iteration to do or to wait for."""
        return self._loop is not None and self._loop.has_work

    async def audit(self) -> list[str]:
        """What is wrong with the books of blocks and rows between two iterations; [] if nothing."""
        problems: list[str] = await self._inbox.control(self._serving_loop().roster.audit)
        return problems

    # -- profile ----------------------------------------------------------------------------

    @property
    def records(self) -> Records:
        """Records of the last iterations and requests."""
        return self._serving_loop().observer.records

    def start_profile(self) -> None:
        """Record every iteration and request from now on; a profile that is being taken starts again."""
        self._serving_loop().observer.start_profile()

    def stop_profile(self) -> Profile:
        """The latest records since `start_profile`, at most PROFILE_SIZE; empty without one."""
        return self._serving_loop().observer.stop_profile()

    # -- text -------------------------------------------------------------------------------

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Raises InvalidRequest when the model has no tokenizer, or it cannot fit."""
        tokenizer = need_tokenizer(self._tokenizer, "text")
        if len(text) <= LONG_TEXT:
            return tokenizer.encode(text, add_special_tokens)
        self._check_fits("text", text, tokenizer)
        return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`."""
        tokenizer = need_tokenizer(self._tokenizer, "token_ids")
        if len(token_ids) <= LONG_TEXT:
            return decode(tokenizer, token_ids)
        return await asyncio.to_thread(decode, tokenizer, token_ids)

    async def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]) -> list[int]:
        """Token ids of a conversation, through the chat template. Raises InvalidRequest."""
        parts = (messages, options.get("tools"), options.get("documents"))
        if sum(len(part) for part in parts if isinstance(part, Sequence)) <= LONG_CHAT:
            return await self.encode_chat(self.chat_text(messages, **options))
        return await self.encode_chat(await asyncio.to_thread(self.chat_text, messages, **options))

    def chat_text(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]) -> str:
        """A conversation as the chat template renders it. Raises InvalidRequest."""
        return self._chat.render(messages, **options)

    @property
    def chat(self) -> ChatRenderer:
        """The model's chat templates; there once the engine has started."""
        return self._chat

    async def encode_chat(self, text: str) -> list[int]:
        """Token ids of a rendered conversation. Raises InvalidRequest when the model has no tokenizer."""
        tokenizer = need_tokenizer(self._tokenizer, "messages")
        if len(text) <= LONG_TEXT:
            return tokenizer.encode_rendered(text)
        self._check_fits("messages", text, tokenizer)
        return await asyncio.to_thread(tokenizer.encode_rendered, text)

    @property
    def tokenizer(self) -> TextTokenizer | None:
        """The model's tokenizer, None when it has none; safe to use from any thread."""
        return self._tokenizer

    def _check_fits(self, field: str, text: str, tokenizer: TextTokenizer) -> None:
        """Before minutes and gigabytes go into tokens that are far too many."""
        limit = self.info.max_model_len
        most = max(LONG_TEXT, limit * tokenizer.longest_token)
        if len(text) > most:
            raise InvalidRequest(field, f"has {len(text)} characters, more than {most} never fit in {limit} tokens")

    def _serving_loop(self) -> EngineLoop:
        if self._loop is None:
            raise EngineStopped("the engine has not been started")
        return self._loop
