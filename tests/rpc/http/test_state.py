"""GET /state over an engine in a known state, and the page's files."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from rpc.http.state import MAX_CELLS, MIN_INTERVAL
from tests.engine.fake_device import FakeDevice
from tests.rpc.fake_engine import FakeEngine
from tests.rpc.http.conftest import Http, HttpServing
from tests.rpc.http.snapshots import snapshot
from tests.rpc.manual_clock import ManualClock
from tests.rpc.real import engine_config, make_checkpoint


@pytest.fixture
async def engine() -> FakeEngine:
    engine = FakeEngine()
    engine.current_snapshot = snapshot()
    return engine


async def state_of(http: Http) -> Any:
    answer = await http.client.get("/state")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    assert answer.headers["cache-control"] == "no-store"
    return answer.json()


async def test_everything_that_is_known(http_serving: HttpServing, engine: FakeEngine) -> None:
    async with http_serving(engine, clock=ManualClock()) as http:
        state = await state_of(http)
    latency = {"bounds": [0.01, 0.1, 1.0], "counts": [0, 3, 1, 0], "sum": 0.53125}
    sizes = ("prompt_tokens", "cached_tokens", "computed_tokens", "output_tokens", "max_output")

    def sequence(name: str, number: int, choice: int, row: int, *values: int) -> dict[str, Any]:
        return {"id": name, "number": number, "choice": choice, "row": row, **dict(zip(sizes, values, strict=True))}

    assert state.pop("time") >= 0
    assert state == {
        "state": "serving",
        "model": {
            "name": "tiny",
            "device": "cpu: test",
            "dtype": "bfloat16",
            "max_model_len": 2048,
            "version": "0.1.0",
        },
        "needs_key": False,
        "totals": {
            "prompt_tokens": 100,
            "generation_tokens": 2**40,
            "prefix_cache_queries": 90,
            "prefix_cache_hits": 32,
            "preemptions": 2,
        },
        "num_running": 3,
        "num_waiting": 4,
        "running": [
            sequence("acme/chatcmp…2e1f0-3", 7, 0, 1, 40, 16, 50, 11, 64),
            sequence("short", 8, 1, 0, 40, 16, 32, 0, 64),
        ],
        "waiting": [sequence("later", 9, 0, -1, 400, 0, 0, 0, 8)],
        "kv_cache_usage": 0.25,
        "num_blocks": 77,
        "block_size": 16,
        "block_groups": [
            {"window": None, "free": 2, "cached": 1, "used": 2, "shared": 1, "blocks_per_cell": 1, "cells": "fcusuf"}
        ],
        "steps": {
            "step": [4, 5],
            "prefill_tokens": [30, 12],
            "decode_tokens": [0, 3],
            "rows": [1, 4],
            "milliseconds": [250.0, 125.0],
            "device_milliseconds": [125.0, 62.5],
        },
        "latency": {
            "time_to_first_token": latency,
            "inter_token_latency": latency,
            "time_per_output_token": latency,
        },
    }


async def test_with_keys_it_is_open_and_names_nobody(
    http_serving: HttpServing, engine: FakeEngine, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret-token acme\n")
    async with http_serving(engine, wait=False, api_key_file=str(keys)) as http:
        assert (await http.client.get("/v1/models")).status_code == 401
        answer = await http.client.get("/state")
        assert (await http.client.get("/")).status_code == 200
    state = answer.json()
    assert state["needs_key"] is True
    assert [s["id"] for s in state["running"] + state["waiting"]] == [None] * 3
    for name in ("acme", "beta", "chatcmpl", "short", "later"):
        assert name not in answer.text


async def test_a_large_pool_has_several_blocks_in_a_cell(http_serving: HttpServing, engine: FakeEngine) -> None:
    states = [2, 2, 0] * 4000 + [1, 1]
    engine.current_snapshot = snapshot([states, [3] * len(states)])
    async with http_serving(engine) as http:
        seen, window = (await state_of(http))["block_groups"]
    assert seen["blocks_per_cell"] == 3 and len(seen["cells"]) <= MAX_CELLS
    assert seen["cells"] == "u" * 4000 + "c"
    assert (seen["free"], seen["cached"], seen["used"], seen["shared"]) == (4000, 2, 8000, 0)
    assert (window["window"], set(window["cells"]), window["shared"]) == (128, {"s"}, len(states))


async def test_however_many_look_snapshots_are_few(http_serving: HttpServing, engine: FakeEngine) -> None:
    clock = ManualClock()
    async with http_serving(engine, clock=clock) as http:
        await asyncio.gather(*(state_of(http) for _ in range(20)))
        assert engine.num_snapshots == 1
        clock.advance(MIN_INTERVAL / 2)
        first = await state_of(http)
        clock.advance(MIN_INTERVAL)
        engine.current_snapshot = snapshot([[0]])
        assert (await state_of(http))["block_groups"] != first["block_groups"]
    assert engine.num_snapshots == 2


async def test_a_real_engine_at_work_and_after(
    http_serving: HttpServing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the device is real."""

    async def open_fake(config: EngineConfig, checkpoint: object, *, num_blocks: int, max_model_len: int) -> FakeDevice:
        return FakeDevice(num_blocks=num_blocks, block_size=config.block_size, max_num_seqs=config.max_num_seqs)

    monkeypatch.setattr("engine.engine.open_device", open_fake)
    engine = Engine(engine_config(make_checkpoint(tmp_path), kv_cache_memory_bytes=24 << 20))
    async with http_serving(engine) as http:
        body = {"prompt": [1] * 40, "max_tokens": 8000, "ignore_eos": True, "temperature": 0}
        call = asyncio.create_task(http.client.post("/v1/completions", json=body))
        state = await state_of(http)
        while not state["running"] or state["running"][0]["output_tokens"] < 20:
            state = await state_of(http)
        (row,), (group,) = state["running"], state["block_groups"]
        assert row["prompt_tokens"] == 40 and row["max_output"] == 8000
        assert row["computed_tokens"] == 40 + row["output_tokens"] - 1
        assert group["used"] * state["block_size"] >= row["computed_tokens"]
        assert len(group["cells"]) == state["num_blocks"] == sum(group[s] for s in ("free", "cached", "used", "shared"))
        assert state["steps"]["decode_tokens"][-1] == state["steps"]["rows"][-1] == 1
        assert sum(state["latency"]["time_to_first_token"]["counts"]) == 1
        call.cancel()
        while state["running"]:
            state = await state_of(http)
        assert state["block_groups"][0]["used"] == 0 < state["block_groups"][0]["cached"]


async def test_before_the_model_is_loaded_the_page_is_there_and_the_state_is_not(http_serving: HttpServing) -> None:
    engine = FakeEngine()
    engine.may_load.clear()
    async with http_serving(engine, wait=False) as http:
        assert (await http.client.get("/")).status_code == 200
        answer = await http.client.get("/state")
        assert (answer.status_code, answer.json()["error"]["message"]) == (503, "the engine is starting")
        engine.may_load.set()
        await http.served.client.wait_serving(30)


async def test_the_pages_files(http: Http) -> None:
    page = await http.client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    for path, kind in (("page.js", "text/javascript"), ("page.css", "text/css"), ("icon.svg", "image/svg+xml")):
        assert f"page/{path}" in page.text
        answer = await http.client.get(f"/page/{path}")
        assert answer.headers["content-type"].startswith(kind)
        assert answer.headers["x-content-type-options"] == "nosniff"
    policy = page.headers["content-security-policy"].split("; ")
    assert "default-src 'none'" in policy and "script-src 'self'" in policy and "frame-ancestors 'none'" in policy
    for path in ("/page/app.py", "/page/..%2fapp.py", "/page/index.html", "/page/"):
        assert (await http.client.get(path)).status_code == 404
