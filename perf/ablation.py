"""What each idea of the field brings, as one table: the engine on the cpu device, with and without it.

    python -m perf.ablation [--quick] [--only PART-OF-A-NAME]        # needs the extra `perf`; six minutes

Rows are configurations of the engine or drivers of perf/ablation_workloads.py. All rows of a group answer the same
requests, greedily, with the same memory for keys and values, and must give the same tokens.

    tok/s          output tokens per second, from the first request to the last token
    TTFT           from when a request was wanted to its first token, ms; waiting for a place is part of it
    TPOT           from one token of a choice to the next, ms: every gap counts, so the tail is that of tokens
    KV used        share of the allocated slots that hold tokens, the mean over all steps

Recorded in perf/results/ablation.json and, as a picture, ablation.svg beside it. Read next: docs/ablation.md.
"""

import gc
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from time import perf_counter
from types import MappingProxyType
from typing import Any, NamedTuple

import click
import numpy as np
import uvloop

from engine.cli.profile.workload import warm_up
from engine.config import EngineConfig
from engine.devices import choose_token_budget, memory_facts
from engine.engine import Engine
from engine.observe.records import IterationRecord
from loader.checkpoint import open_checkpoint
from loader.demo import demo_checkpoint
from perf.ablation_plot import plot
from perf.ablation_workloads import (
    Driver,
    Maker,
    Measured,
    Request,
    at_once,
    in_batches,
    in_turns,
    long_among_short,
    recomputing,
)
from perf.record import RESULTS, record

MAX_MODEL_LEN = 512
KV_TOKENS = 4096
"""Slots of bfloat16 keys and values in the memory that all rows of the first groups have."""
ROWS = 16
PERCENTILES = (50, 99, 99.9)


class Row(NamedTuple):
    """A row of the table.

    Attributes:
        settings: of EngineConfig, beside the group's.
        reserves: slots that each running sequence is counted to hold, None for those of its blocks.
        keeps_kv: whether there is a KV cache to speak of.
    """

    group: str
    name: str
    requests: Callable[[Maker], list[Request]]
    driver: Driver = at_once
    settings: Mapping[str, Any] = MappingProxyType({})
    reserves: int | None = None
    keeps_kv: bool = True


TIGHT = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": ROWS, "kv_tokens": KV_TOKENS, "enable_prefix_caching": False}
ROOMY = {"max_model_len": 2048, "max_num_seqs": ROWS, "kv_tokens": 32768, "enable_prefix_caching": False}
GROUPS: dict[str, dict[str, Any]] = {
    "mixed": TIGHT,
    "prompts among decodes": ROOMY,
    "multi-turn chat": ROOMY,
    "one document": ROOMY,
    "few-shot": ROOMY,
    "8 choices": TIGHT | {"max_num_seqs": 32},
}
RESERVING = {"max_num_seqs": KV_TOKENS // MAX_MODEL_LEN}
CACHED = {"enable_prefix_caching": True}
TABLE = (
    Row("mixed", "no KV cache", Maker.first_mixed, recomputing, keeps_kv=False),
    Row("mixed", "contiguous KV", Maker.mixed, settings=RESERVING, reserves=MAX_MODEL_LEN),
    Row("mixed", "paged, static batches", Maker.mixed, in_batches(ROWS)),
    Row("mixed", "paged, continuous", Maker.mixed),
    Row("mixed", "paged, continuous, int8 KV", Maker.mixed, settings={"kv_cache_dtype": "int8", "max_num_seqs": 32}),
    Row("prompts among decodes", "whole prompts", Maker.long_among_short, long_among_short,
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 2048}),
    Row("prompts among decodes", "chunks of 512", Maker.long_among_short, long_among_short),
    Row("prompts among decodes", "chunks of 128", Maker.long_among_short, long_among_short,
        {"max_num_batched_tokens": 128}),
    Row("multi-turn chat", "no prefix cache", Maker.conversations, in_turns(5)),
    Row("multi-turn chat", "prefix cache", Maker.conversations, in_turns(5), CACHED),
    Row("one document", "no prefix cache", Maker.questions),
    Row("one document", "prefix cache", Maker.questions, settings=CACHED),
    Row("few-shot", "no prefix cache", Maker.few_shot),
    Row("few-shot", "prefix cache", Maker.few_shot, settings=CACHED),
    Row("8 choices", "every choice by itself", Maker.apart),
    Row("8 choices", "choices share their prompt", Maker.several),
)  # fmt: skip


@click.command()
@click.option("--model", type=click.Path(path_type=Path), help="Checkpoint; the demo model if unset.")
@click.option("--quick", is_flag=True, help="Few and short requests: shows that it works, the numbers mean nothing.")
@click.option("--only", default="", help="Measure rows with this in workload or name; others stay as recorded.")
@click.option("--folder", type=click.Path(path_type=Path), default=RESULTS, help="Where the record goes.")
def main(model: Path | None, quick: bool, only: str, folder: Path) -> None:
    """Measure every row and record the table."""
    rows = [row for row in TABLE if only in row.group or only in row.name]
    if not rows:
        raise click.UsageError(f"--only: no row has {only!r} in its name")
    path = folder / "ablation.json"
    recorded = json.loads(path.read_text())["rows"] if only and path.exists() else []
    table = merged(recorded, uvloop.run(measure_all(rows, model or demo_checkpoint(), quick)))
    record("ablation", table, title="With and without", folder=folder)
    plot(table, path.with_suffix(".svg"))


def merged(*tables: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of TABLE that are in any of these, in its order; later ones count."""
    found = {(r["workload"], r["configuration"]): r for table in tables for r in table}
    return [found[key] for row in TABLE if (key := (row.group, row.name)) in found]


async def measure_all(rows: list[Row], model: Path, quick: bool) -> list[dict[str, Any]]:
    """Those rows, in any order; the same configuration is the same engine. Raises when tokens differ in a group."""
    table, outputs = [], dict[str, list[list[int]]]()
    by_config: dict[EngineConfig, list[Row]] = {}
    for row in rows:
        by_config.setdefault(engine_config(row, model), []).append(row)
    for config, same in by_config.items():
        async with Engine(config) as engine:
            for row in same:
                await warm_up(engine)
                measured, records = await measure(engine, row, quick)
                if config.kv_cache_dtype == "auto":
                    check_outputs(row, measured.outputs, outputs)
                table.append(table_row(row, measured, records, engine))
    return table


def engine_config(row: Row, model: Path) -> EngineConfig:
    """With memory for the group's `kv_tokens` as the compute dtype keeps them."""
    settings = GROUPS[row.group] | dict(row.settings)
    kv_tokens = settings.pop("kv_tokens")
    checkpoint = open_checkpoint(model)
    base = choose_token_budget("cpu", EngineConfig(model=str(model), device="cpu"), checkpoint)
    block = memory_facts("cpu", base, checkpoint).block
    return replace(base, kv_cache_memory_bytes=block * kv_tokens // base.block_size, **settings)


async def measure(engine: Engine, row: Row, quick: bool) -> tuple[Measured, list[IterationRecord]]:
    """What the driver saw, and the iterations of the engine."""
    requests, measured = row.requests(Maker(engine.info.vocab_size, quick)), Measured()
    gc.collect()
    engine.start_profile()
    began = perf_counter()
    await row.driver(engine, requests, measured)
    measured.seconds = perf_counter() - began
    return measured, engine.stop_profile().iterations


def check_outputs(row: Row, outputs: list[list[int]], of_groups: dict[str, list[list[int]]]) -> None:
    """Every way to serve the requests of a group gives the same tokens; the shorter list is of the first of them."""
    expected = of_groups.setdefault(row.group, outputs)
    if any(a != b for a, b in zip(expected, outputs, strict=False)):
        raise click.ClickException(f"{row.group}, {row.name}: other tokens than the first row of the group")


def table_row(row: Row, measured: Measured, records: list[IterationRecord], engine: Engine) -> dict[str, Any]:
    return {
        "workload": row.group,
        "configuration": row.name,
        "tok/s": round(sum(map(len, measured.outputs)) / measured.seconds, 1),
        **{f"TTFT p{p}": round(1e3 * np.percentile(measured.ttft, p), 1) for p in PERCENTILES},
        **{f"TPOT p{p}": round(1e3 * np.percentile(measured.tpot, p), 1) for p in PERCENTILES},
        "KV used": f"{100 * kv_used(row, records, engine):.1f}%" if row.keeps_kv else "",
        "seconds": round(measured.seconds, 1),
    }


def kv_used(row: Row, records: list[IterationRecord], engine: Engine) -> float:
    """Tokens held over slots allocated, the mean over the steps."""
    slots = engine.info.num_blocks * engine.info.block_size
    return fmean(shares(row, records, slots))


def shares(row: Row, records: list[IterationRecord], slots: int) -> Iterator[float]:
    for iteration in records:
        if iteration.running and row.reserves is None:
            yield iteration.kv_fill
        elif iteration.running and row.reserves is not None:
            yield iteration.kv_fill * iteration.kv_usage * slots / (iteration.running * row.reserves)


if __name__ == "__main__":
    main()
