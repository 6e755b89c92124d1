"""SmolLM2 through the whole engine: golden ids and logprobs, hits that equal misses, and text that streams whole.

The reference is another implementation's output (tests/golden/README.md) or the tokenizer's one-shot decode.
"""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from engine.config import EngineConfig
from engine.engine import Engine
from engine.request.params import SamplingParams
from tests.conftest import GOLDEN
from tests.system.harness import answer_of, ask, is_clean, values

FILE = np.load(GOLDEN / "smollm2-135m-instruct" / "golden.npz")
PROMPTS = [FILE[f"prompt_{k}"].tolist() for k in range(5)]
TEXTS = [str(FILE[f"text_{k}"]) for k in range(5)]
GREEDY = [FILE[f"greedy_{k}"][:24].tolist() for k in range(5)]
SETTINGS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 8, "cpu_threads": 2}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(smollm2: Path) -> AsyncIterator[Engine]:
    async with Engine(EngineConfig(model=str(smollm2), dtype="float32", **SETTINGS)) as engine:
        yield engine


@pytest.mark.parametrize("k", range(5))
async def test_greedy_ids_and_prompt_logprobs(engine: Engine, k: int) -> None:
    """S16: entry i is the logprob of token i after those before it; the first has none."""
    answer = await ask(engine, PROMPTS[k], temperature=0, max_tokens=24, prompt_logprobs=0, logprobs=0)
    assert answer.ids == GREEDY[k]
    maps = answer.prompt_logprobs
    assert maps is not None and maps[0] is None and len(maps) == len(PROMPTS[k])
    assert [next(iter(m)) for m in maps if m] == PROMPTS[k][1:]
    assert np.abs(np.array(values(maps)) - FILE[f"prompt_logprobs_{k}"]).max() < 0.02
    first = FILE[f"last_logits_{k}"].astype(np.float64)
    wanted = first[GREEDY[k][0]] - np.log(np.exp(first - first.max()).sum()) - first.max()
    assert abs(values(answer.choices[0].logprobs)[0] - wanted) < 0.02


async def test_a_bias_of_ten_thousand_ids(engine: Engine) -> None:
    """The most likely of the others wins; an empty bias is none."""
    banned = [*GREEDY[0], *range(100, 10_100)]
    logits = FILE["last_logits_0"].astype(np.float64)
    logits[banned] -= 100.0
    biased = await ask(engine, PROMPTS[0], temperature=0, max_tokens=1, logit_bias=dict.fromkeys(banned, -100))
    assert logits[biased.ids[0]] > logits.max() - 0.02
    assert (await ask(engine, PROMPTS[0], temperature=0, max_tokens=24, logit_bias={})).ids == GREEDY[0]


async def test_all_prompts_at_once(engine: Engine) -> None:
    answers = await asyncio.gather(*(ask(engine, p, temperature=0, max_tokens=24) for p in PROMPTS))
    assert [a.ids for a in answers] == GREEDY


@pytest.mark.parametrize(("length", "cached"), [(15, 0), (16, 0), (17, 16), (32, 16), (33, 32)])
async def test_the_same_prompt_twice(engine: Engine, length: int, cached: int) -> None:
    """K05: whole blocks are hit, one token at least is computed, and the logprobs are a miss's."""
    prompt = np.random.default_rng(length).integers(100, 40000, length).tolist()
    first = await ask(engine, prompt, temperature=0, max_tokens=5, logprobs=5)
    second = await ask(engine, prompt, temperature=0, max_tokens=5, logprobs=5)
    assert (first.cached, second.cached) == (0, cached)
    assert second == first


async def test_two_equal_prompts_at_once(engine: Engine) -> None:
    """The second waits for the first one's blocks instead of "hitting" what is not computed."""
    prompt = np.random.default_rng(2).integers(100, 40000, 33).tolist()
    one, two = await asyncio.gather(*(ask(engine, prompt, temperature=0, max_tokens=6, logprobs=1) for _ in range(2)))
    assert one == two
    assert (one.cached, two.cached) == (0, 32)


async def test_choices_compute_one_prompt(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = np.random.default_rng(3).integers(100, 40000, 40).tolist()
    computed: list[int] = []
    forward = engine._device.forward

    def counted(plan: Any) -> Any:
        computed.append(int(plan.num_tokens.sum()))
        return forward(plan)

    monkeypatch.setattr(engine._device, "forward", counted)
    answer = await ask(engine, prompt, n=4, seed=7, max_tokens=10, logprobs=0)
    assert sum(computed) == 40 + 4 * 9
    assert len({tuple(c.ids) for c in answer.choices.values()}) == 4
    for index, choice in answer.choices.items():
        assert [next(iter(m)) for m in choice.logprobs] == choice.ids, index
    assert (await ask(engine, prompt, n=1, seed=7, max_tokens=10)).ids == answer.choices[0].ids
    assert await is_clean(engine)


# -- text ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt",
    [
        "Repeat: 👍🏽 👩‍👩‍👧 🇨🇿 →",
        "日本語で答えてください。東京は",
        "Napiš česky: Příliš žluťoučký kůň",
        "मुझे हिंदी में बताओ",
    ],
    ids=["emoji", "japanese", "czech", "hindi"],
)
async def test_deltas_join_to_the_one_shot_decode(engine: Engine, prompt: str) -> None:
    """T01: at temperature 1.3 the model writes many broken and whole multi-token characters."""
    answer = await ask(engine, prompt, temperature=1.3, seed=1, max_tokens=48, skip_special_tokens=False)
    ids = await engine.tokenize(prompt)
    whole, before = await engine.detokenize([*ids, *answer.ids]), await engine.detokenize(ids)
    assert before == prompt and answer.text == whole[len(before) :]
    for delta in answer.deltas:
        assert "\ufffd" not in delta.text or "\ufffd" in whole


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(("start", "length"), [(0, 3), (5, 9), (11, 14), (20, 30)])
async def test_stop_strings_across_tokens(engine: Engine, start: int, length: int, include: bool) -> None:
    """T06: the text ends just before (or behind) the first occurrence; nothing of the stop leaks."""
    full = (await ask(engine, TEXTS[2], temperature=0, max_tokens=24)).text
    stop = full[start : start + length]
    params = {"temperature": 0, "max_tokens": 24, "stop": [stop, "never this"], "include_stop_str_in_output": include}
    answer = await ask(engine, TEXTS[2], **params)
    end = full.index(stop)
    assert answer.text == full[: end + len(stop) * include]
    assert answer.choices[0].finish == ("stop", stop)
    assert await is_clean(engine)


async def test_a_stop_that_only_begins_is_given_back(engine: Engine) -> None:
    full = (await ask(engine, TEXTS[2], temperature=0, max_tokens=24)).text
    answer = await ask(engine, TEXTS[2], temperature=0, max_tokens=24, stop=full[-6:] + "and more")
    assert answer.text == full and answer.choices[0].finish == ("length", None)


# -- length and ends ------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 7])
async def test_max_tokens(engine: Engine, count: int) -> None:
    """T15: 0 computes the prompt only."""
    answer = await ask(engine, PROMPTS[0], temperature=0, max_tokens=count, prompt_logprobs=1)
    assert answer.ids == GREEDY[0][:count]
    assert answer.choices[0].finish == ("length", None)
    assert answer.prompt_logprobs is not None and len(answer.prompt_logprobs) == 5


@pytest.mark.parametrize("max_tokens", [None, 2**31 - 1])
async def test_max_tokens_unset_or_huge_is_as_many_as_fit(engine: Engine, max_tokens: int | None) -> None:
    """T15"""
    prompt = np.random.default_rng(6).integers(100, 40000, 246).tolist()
    answer = await ask(engine, prompt, temperature=0, max_tokens=max_tokens)
    assert len(answer.ids) == 10 and answer.choices[0].finish == ("length", None)


async def test_end_ids(engine: Engine) -> None:
    """T17: an answer ends at the model's end id, not under ignore_eos; a user's stop id ends it anyway."""
    prompt = await engine.render_chat([{"role": "user", "content": "Say only the word yes."}])
    ended = await ask(engine, prompt, temperature=0, max_tokens=60, ignore_eos=False)
    end = engine._checkpoint.generation.eos_token_ids[0]
    assert ended.choices[0].finish == ("stop", None) and ended.ids[-1] == end and end not in ended.ids[:-1]
    ignored = await ask(engine, prompt, temperature=0, max_tokens=60)
    assert ignored.ids[: len(ended.ids)] == ended.ids and len(ignored.ids) == 60
    stopped = await ask(engine, prompt, temperature=0, max_tokens=60, stop_token_ids=[end])
    assert stopped.ids == ended.ids and stopped.choices[0].finish == ("stop", end)
    assert stopped.text == ended.text == await engine.detokenize(ended.ids[:-1])
    least = len(ended.ids) + 4
    longer = await ask(engine, prompt, temperature=0, max_tokens=60, min_tokens=least, ignore_eos=False)
    assert longer.ids[: len(ended.ids) - 1] == ended.ids[:-1] and end not in longer.ids[:least]


async def test_beam_search_and_best_of(engine: Engine) -> None:
    """A beam of one is greedy; more beams find at least as likely an output of the same length."""
    greedy = await ask(engine, PROMPTS[3], temperature=0, max_tokens=12, logprobs=0)
    one = await ask(engine, PROMPTS[3], temperature=0, max_tokens=12, use_beam_search=True)
    assert one.ids == greedy.ids == GREEDY[3][:12]
    four = await ask(engine, PROMPTS[3], temperature=0, max_tokens=12, use_beam_search=True, n=2, best_of=4)
    scores = [four.deltas[i].cumulative_logprob for i in range(2)]
    assert scores[0] is not None and scores[1] is not None and scores[0] >= scores[1]
    assert scores[0] >= sum(values(greedy.choices[0].logprobs)) - 1e-4
    forced = await ask(engine, [*PROMPTS[3], *four.choices[0].ids], max_tokens=0, prompt_logprobs=0)
    assert forced.prompt_logprobs is not None
    assert abs(sum(values(forced.prompt_logprobs[len(PROMPTS[3]) :])) - scores[0]) < 1e-3
    assert await is_clean(engine)


async def test_cancelled_text_is_a_beginning(engine: Engine) -> None:
    full = (await ask(engine, TEXTS[4], temperature=0, max_tokens=60)).text
    stream = engine.generate(TEXTS[4], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    heard = ""
    async for delta in stream:
        heard += delta.text
        if len(heard) > 10:
            engine.abort(stream.request_id)
            rest = await answer_of(stream)
            break
    assert rest.choices[0].finish == ("abort", None)
    assert full.startswith(heard + rest.text)
    assert await is_clean(engine)


async def test_tokenizing_a_long_text_stops_no_stream(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """R22: the tokenizer here ends only when another stream has; on the event loop it would wait for ever."""
    other_ended = threading.Event()
    tokenizer = engine._tokenizer
    assert tokenizer is not None
    encode = tokenizer.encode

    def patient(text: str, add_special_tokens: bool = True) -> list[int]:
        assert other_ended.wait(60), "the streams waited for the tokenizer"
        return encode(text, add_special_tokens)

    with monkeypatch.context() as patch:
        patch.setattr(type(tokenizer), "encode", lambda _, *args: patient(*args))
        long = asyncio.create_task(engine.tokenize("one two three " * 1_000))
        await ask(engine, PROMPTS[0], temperature=0, max_tokens=8)
        other_ended.set()
        assert len(await long) >= 3_000
