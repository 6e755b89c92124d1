"""perf/ablation.py: its drivers ask for what they say, and the whole table can be made."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from engine.request.outputs import Delta
from engine.request.params import SamplingParams
from perf.ablation import TABLE, Row, check_outputs, main, merged
from perf.ablation_workloads import Measured, Request, at_once, in_batches, in_turns, long_among_short, recomputing
from tests.rpc.real import make_checkpoint


class CountingEngine:
    """Goes on counting from the last id of a prompt; what it was asked and when answers ended is in `log`."""

    def __init__(self) -> None:
        self.log: list[tuple[str, list[int]]] = []

    async def generate(self, prompt: list[int], params: SamplingParams) -> AsyncIterator[Delta]:
        self.log.append(("asked", prompt))
        for i in range(1, (params.max_tokens or 0) + 1):
            await asyncio.sleep(0)
            for index in range(params.n):
                yield Delta(index, "", (prompt[-1] + i,))
        self.log.append(("ended", prompt))


async def drive(driver: Any, *requests: Request) -> tuple[CountingEngine, Measured]:
    engine, measured = CountingEngine(), Measured()
    await driver(engine, list(requests), measured)
    return engine, measured


async def test_every_token_after_the_first_of_its_choice_has_a_gap() -> None:
    _, measured = await drive(at_once, Request([10], 3, n=2), Request([20], 1))
    assert measured.outputs == [[11, 12, 13], [11, 12, 13], [21]]
    assert (len(measured.ttft), len(measured.tpot)) == (2, 4)


async def test_a_static_batch_waits_for_the_one_before() -> None:
    engine, measured = await drive(in_batches(2), Request([10], 1), Request([20], 5), Request([30], 1))
    assert engine.log.index(("ended", [20])) < engine.log.index(("asked", [30]))
    assert engine.log.index(("asked", [20])) < engine.log.index(("ended", [10]))
    assert measured.outputs == [[11], [21, 22, 23, 24, 25], [31]]


async def test_without_kv_cache_each_token_sends_everything_again() -> None:
    engine, measured = await drive(recomputing, Request([10], 3))
    assert [p for what, p in engine.log if what == "asked"] == [[10], [10, 11], [10, 11, 12]]
    assert measured.outputs == [[11, 12, 13]]
    assert (len(measured.ttft), len(measured.tpot)) == (1, 2)


async def test_a_turn_goes_on_behind_what_was_said() -> None:
    engine, _ = await drive(in_turns(2), Request([10], 2), Request([50], 1), Request([70], 1), Request([90], 1))
    asked = [p for what, p in engine.log if what == "asked"]
    assert sorted(asked) == [[10], [10, 11, 12, 50], [70], [70, 71, 90]]


async def test_long_prompts_come_one_at_a_time_while_the_others_decode() -> None:
    engine, measured = await drive(long_among_short, Request([10], 9), Request([30], 1), Request([40], 1))
    assert engine.log.index(("ended", [30])) < engine.log.index(("asked", [40]))
    assert engine.log.index(("ended", [40])) < engine.log.index(("ended", [10]))
    assert (len(measured.ttft), len(measured.tpot)) == (3, 8)


def test_other_tokens_in_a_group_are_an_error() -> None:
    outputs: dict[str, list[list[int]]] = {}
    check_outputs(TABLE[0], [[1, 2]], outputs)
    check_outputs(TABLE[1], [[1, 2], [3]], outputs)
    with pytest.raises(click.ClickException, match="other tokens"):
        check_outputs(TABLE[1], [[1, 3], [3]], outputs)


def test_rows_measured_again_replace_those_recorded() -> None:
    def named(row: Row, tokens: int) -> dict[str, Any]:
        return {"workload": row.group, "configuration": row.name, "tok/s": tokens}

    recorded = [named(TABLE[0], 1), named(TABLE[1], 2), {"workload": "gone", "configuration": "", "tok/s": 9}]
    again = [named(TABLE[3], 4), named(TABLE[1], 3)]
    assert merged(recorded, again) == [named(TABLE[0], 1), named(TABLE[1], 3), named(TABLE[3], 4)]


def test_the_whole_table(tmp_path: Path) -> None:
    """Every row runs and gives the tokens of its group; paged blocks are full where reserved slots are not."""
    model = tmp_path / "model"
    model.mkdir()
    arguments = ["--quick", "--model", str(make_checkpoint(model)), "--folder", str(tmp_path)]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "ablation.json").read_text())["rows"]
    assert [(r["workload"], r["configuration"]) for r in rows] == [(row.group, row.name) for row in TABLE]
    used = {r["configuration"]: float(r["KV used"].rstrip("%") or 0) for r in rows}
    assert used["contiguous KV"] < 60 < 90 < used["paged, continuous"]
    picture = (tmp_path / "ablation.svg").read_text()
    assert all(row.name in picture for row in TABLE)
