"""Engine at the door: what is refused, by field, before it is queued; and its life from start to stop.

The checkpoint is real (it has no tokenizer), the device is the fake one.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError, DeviceFault, EngineStopped, InvalidRequest, OverCapacity
from engine.grammar.grammar import Grammar, GrammarCompiler
from engine.request.params import SamplingParams
from engine.request.structured import StructuredOutputs
from tests.engine.fake_device import FakeDevice, expected
from tests.engine.server import collect, tokens_of

LLAMA = Path(__file__).parents[1] / "golden" / "llama"
BLOCK_BYTES = 2 * 2 * 2 * 64 * 4 * 16
"""K and V, 2 layers, 2 KV heads, 64 wide, float32, 16 tokens."""


@asynccontextmanager
async def serving(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> AsyncIterator[tuple[Engine, FakeDevice]]:
    devices: list[FakeDevice] = []

    async def open_fake(config: EngineConfig, checkpoint: object, *, num_blocks: int, max_model_len: int) -> FakeDevice:
        devices.append(
            FakeDevice(num_blocks=num_blocks, block_size=config.block_size, max_num_seqs=config.max_num_seqs)
        )
        return devices[0]

    monkeypatch.setattr("engine.engine.open_device", open_fake)
    defaults = {"model": str(LLAMA), "max_model_len": 64, "max_num_seqs": 4, "dtype": "float32", "max_logprobs": 8}
    config = EngineConfig(**{**defaults, **settings})
    async with Engine(config) as engine:
        yield engine, devices[0]
    assert devices[0].closed


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": 4, **values})


class VeryLong(Sequence[int]):
    """A prompt whose ids nobody has the time to look at."""

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, item: Any) -> Any:
        raise AssertionError("an id was looked at")


@pytest.mark.parametrize(
    ("prompt", "values", "message"),
    [
        ([], {}, "prompt: is empty"),
        ("text", {}, "prompt: the model has no tokenizer"),
        ([1], {"structured_outputs": StructuredOutputs(regex="a")}, "structured_outputs: the model has no tokenizer"),
        ([1, 512], {}, "prompt: token id 512 is out of range, must be between 0 and 511"),
        ([-1], {}, "prompt: token id -1 is out of range"),
        ([1.5], {}, "prompt: must be text or token ids"),
        (["1"], {}, "prompt: must be text or token ids"),
        (None, {}, "prompt: must be text or token ids"),
        (list(range(64)), {}, "prompt: has 64 tokens, at most 63 fit in max_model_len 64"),
        (list(range(64)), {"truncate_prompt_tokens": 64}, "prompt: has 64 tokens, at most 63 fit"),
        (VeryLong(), {}, "prompt: has 1000000000 tokens, at most 63 fit"),
        ([1] * 640, {"max_tokens": None}, "prompt: has 640 tokens, at most 63 fit"),
        ([1] * 65, {"max_tokens": 0}, "prompt: has 65 tokens"),
        ([1], {"stop_token_ids": [512]}, "stop_token_ids: token id 512"),
        ([1], {"logit_bias": {511: 1.0, 512: 1.0}}, "logit_bias: token id 512"),
        ([1], {"logit_bias": {513: 1.0}}, "logit_bias: token id 513"),
        ([1], {"logit_bias": {1 << 31: 1.0}}, "logit_bias: token id 2147483648"),
        ([1], {"allowed_token_ids": [2, 600]}, "allowed_token_ids: token id 600"),
        ([1], {"logprobs": 9}, "logprobs: 9 is above max_logprobs 8"),
        ([1], {"prompt_logprobs": 9}, "prompt_logprobs: 9 is above max_logprobs 8"),
        ([1], {"stop": "x"}, "stop: the model has no tokenizer"),
        ([1], {"bad_words": ["x"]}, "bad_words: the model has no tokenizer"),
        ([1], {"n": 5}, "n: 5 choices are above max_num_seqs 4"),
        ([1], {"best_of": 5}, "best_of: 5 choices are above max_num_seqs 4"),
    ],
)
async def test_what_can_never_be_served_is_refused_by_field(
    monkeypatch: pytest.MonkeyPatch, prompt: Any, values: dict[str, Any], message: str
) -> None:
    """T12, T13, S12: and another stream goes on."""
    async with serving(monkeypatch) as (engine, _):
        other = asyncio.create_task(tokens_of(engine.generate([5, 6], params(max_tokens=20))))
        with pytest.raises(InvalidRequest, match=message):
            engine.generate(prompt, params(**values))
        assert await other == expected([5, 6], 20)
        assert await engine.audit() == []


@pytest.mark.parametrize(("max_tokens", "produced"), [(0, 0), (1, 1), (None, 54), (2**31 - 1, 54)])
async def test_max_tokens_is_bounded_by_the_context(
    monkeypatch: pytest.MonkeyPatch, max_tokens: int | None, produced: int
) -> None:
    """T15"""
    async with serving(monkeypatch) as (engine, _):
        deltas = await collect(engine.generate([1] * 10, params(max_tokens=max_tokens)))
        assert sum(len(d.token_ids) for d in deltas) == produced
        assert deltas[-1].finish_reason == "length"


async def test_the_prompts_last_tokens_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch) as (engine, _):
        stream = engine.generate(list(range(100)), params(truncate_prompt_tokens=3))
        assert stream.prompt_token_ids == [97, 98, 99]
        assert await tokens_of(stream) == expected([97, 98, 99], 4)


async def test_a_live_request_id_is_not_given_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch) as (engine, _):
        stream = engine.generate([1], params(), request_id="a")
        with pytest.raises(InvalidRequest, match="request_id: 'a' is in use"):
            engine.generate([2], params(), request_id="a")
        await collect(stream)
        assert await tokens_of(engine.generate([2], params(), request_id="a")) == expected([2], 4)


async def test_abort_by_id_ends_the_stream_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch) as (engine, _):
        stream = engine.generate([1], params(max_tokens=50), request_id="a")
        assert engine.abort("a") and not engine.abort("b")
        assert (await collect(stream))[-1].finish_reason == "abort"
        assert not engine.abort("a")
        assert await engine.audit() == []


async def test_unseeded_requests_draw_different_seeds_and_the_same_after_a_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """S11"""
    drawn = []
    for _ in range(2):
        async with serving(monkeypatch) as (engine, device):
            for _ in range(3):
                await collect(engine.generate([1], params()))
            await collect(engine.generate([1], params(seed=0)))
            drawn.append([state.seed for plan in device.plans for state in plan.row_states])
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0][:3])) == 3 and drawn[0][3] == 0


async def test_a_full_queue_is_over_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch, max_queued_requests=1) as (engine, _):
        stream = engine.generate([1], params())
        with pytest.raises(OverCapacity):
            engine.generate([2], params())
        assert await tokens_of(stream) == expected([1], 4)


async def test_draining_finishes_what_is_live_and_refuses_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch) as (engine, _):
        stream = engine.generate([1], params(max_tokens=20))
        states = [engine.state]
        await engine.drain(60)
        assert [*states, engine.state] == ["serving", "draining"]
        with pytest.raises(EngineStopped, match="draining"):
            engine.generate([1], params())
        assert await tokens_of(stream) == expected([1], 20)


async def test_the_grace_time_ends_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even while the device hangs."""
    async with serving(monkeypatch) as (engine, device):
        device.gated = True
        stream = engine.generate([1], params())
        await engine.drain(0)
        with pytest.raises(EngineStopped, match="grace time"):
            await collect(stream)


async def test_draining_what_has_failed_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch) as (engine, device):
        device.faults[1] = DeviceFault("gone")
        with pytest.raises(DeviceFault):
            await collect(engine.generate([1], params()))
        await engine.wait_failed()
        async with asyncio.timeout(5):
            await engine.drain(3600)


async def test_the_info_says_what_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch, kv_cache_memory_bytes=7 * BLOCK_BYTES) as (engine, _):
        info = engine.info
        assert (info.served_model_name, info.architecture) == ("llama", "LlamaForCausalLM")
        assert (info.num_blocks, info.block_size, info.max_model_len, info.vocab_size) == (7, 16, 64, 512)
        assert (info.device, info.dtype) == ("fake: hash of the context", "int32")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "cuda", "model": "/no/such/folder"}, "device: cuda"),  # before the model is looked at
        ({"max_model_len": 1024}, "max_model_len: 1024 is above the model's limit of 512"),
        ({"kv_cache_memory_bytes": 3 * BLOCK_BYTES}, "needs 4 blocks .* hold 3"),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 32},
            "max_num_batched_tokens: 32 is less than max_model_len 64",
        ),
    ],
)
async def test_settings_that_cannot_work_are_refused_at_start(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], message: str
) -> None:
    """K19, R19"""
    with pytest.raises(ConfigError, match=message):
        async with serving(monkeypatch, **settings):
            raise AssertionError("it started")


async def test_a_request_larger_than_the_pool_is_refused_and_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """K01: eight blocks of 16 hold 128 tokens."""
    async with serving(monkeypatch, kv_cache_memory_bytes=8 * BLOCK_BYTES, max_model_len=None) as (engine, _):
        small = [engine.generate([i] * 20, params()) for i in range(1)]
        with pytest.raises(InvalidRequest, match="prompt: has 200 tokens, at most 127 fit in max_model_len 128"):
            engine.generate([1] * 200, params())
        small += [engine.generate([i] * 20, params()) for i in range(1, 3)]
        assert [await tokens_of(s) for s in small] == [expected([i] * 20, 4) for i in range(3)]
        assert await engine.audit() == []


async def test_grammars_are_compiled_off_the_loop_and_found_by_generate(
    monkeypatch: pytest.MonkeyPatch, smollm2: Path
) -> None:
    threads: list[str] = []
    compile_it = GrammarCompiler._compile

    def compile_and_note(self: GrammarCompiler, wanted: StructuredOutputs) -> Grammar:
        threads.append(threading.current_thread().name)
        return compile_it(self, wanted)

    monkeypatch.setattr(GrammarCompiler, "_compile", compile_and_note)
    asked = params(structured_outputs=StructuredOutputs(regex="[ab]{3}"))
    async with serving(monkeypatch, model=str(smollm2), kv_cache_memory_bytes=8 << 20) as (engine, _):
        await engine.compile_grammar(params())
        for _ in range(2):
            await engine.compile_grammar(asked)
        engine.generate([1, 2], asked).cancel()
        with pytest.raises(InvalidRequest, match=r"^structured_outputs\.regex: .*unclosed group"):
            await engine.compile_grammar(params(structured_outputs=StructuredOutputs(regex="a(")))
    assert len(threads) == 2
    assert threading.current_thread().name not in threads


async def test_a_grammar_that_takes_too_long_to_compile_is_refused(
    monkeypatch: pytest.MonkeyPatch, smollm2: Path
) -> None:
    may_end = threading.Event()
    monkeypatch.setattr("engine.engine.COMPILE_SECONDS", 0.0)
    monkeypatch.setattr(GrammarCompiler, "_compile", lambda self, wanted: may_end.wait())
    async with serving(monkeypatch, model=str(smollm2), kv_cache_memory_bytes=8 << 20) as (engine, _):
        with pytest.raises(InvalidRequest, match=r"^structured_outputs\.regex: was not compiled within 0 s"):
            await engine.compile_grammar(params(structured_outputs=StructuredOutputs(regex="a")))
        may_end.set()


async def test_a_text_that_can_never_fit_is_refused_before_it_is_tokenized(
    monkeypatch: pytest.MonkeyPatch, smollm2: Path
) -> None:
    """The longest token of this tokenizer is 81 characters."""
    async with serving(monkeypatch, model=str(smollm2), max_model_len=512, kv_cache_memory_bytes=24 << 20) as (e, _):
        fits = "a" * (81 * 512)
        assert 1 < len(await e.tokenize(fits)) < len(fits)
        with pytest.raises(InvalidRequest, match=r"^text: has 41473 characters, more than 41472 never fit in 512 tok"):
            await e.tokenize(fits + "a")
        with pytest.raises(InvalidRequest, match=r"^messages: has \d+ characters"):
            await e.render_chat([{"role": "user", "content": fits}])


async def test_min_tokens_beyond_what_fits_is_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices hold positions in 32 bits."""
    async with serving(monkeypatch) as (engine, device):
        wanted = params(max_tokens=None, min_tokens=(1 << 32) - 1, ignore_eos=False)
        tokens = await tokens_of(engine.generate([1, 2], wanted))
        assert len(tokens) == 62
        assert [state.min_position for plan in device.plans for state in plan.row_states] == [64]


async def test_a_long_chat_is_rendered_off_the_loop(monkeypatch: pytest.MonkeyPatch, smollm2: Path) -> None:
    threads: list[str] = []
    render = Engine.chat_text

    def render_and_note(self: Engine, *args: Any, **options: Any) -> str:
        threads.append(threading.current_thread().name)
        return render(self, *args, **options)

    monkeypatch.setattr(Engine, "chat_text", render_and_note)
    message = {"role": "user", "content": "a"}
    async with serving(monkeypatch, model=str(smollm2), kv_cache_memory_bytes=8 << 20) as (engine, _):
        await engine.render_chat([message])
        cases: list[dict[str, Any]] = [{}, {"documents": [{}] * 200}]
        for many in cases:
            await engine.render_chat([message] if many else [message] * 200, **many)
    loop, *others = threads
    assert loop == threading.current_thread().name
    assert len(others) == 2 and loop not in others
