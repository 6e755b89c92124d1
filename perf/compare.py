"""This engine beside others: one model, one workload, one machine, one run.

    PEERS=FOLDER bash perf/peers/install.sh        # once; any folder outside the repository
    python -m perf.compare FOLDER [--only NAME] [--metric NAME] [--rounds N] [--add]

Every round visits every engine, so that a machine that gets slower meanwhile does so for all. A visit is a new process
that has served nothing yet: one request at a time (TTFT, then TPOT); 32 different requests at once, after as many with
other tokens, as some engines compile for shapes; 16 requests with a common prefix at once. Figures are medians with
the least and the most; "others" is what else used the processor. What takes longer than SLOW_SECONDS is done once.
`--add` keeps the samples of the last record, so that a run can be made in pieces. Compiled code is kept on disk, so use
each engine once before.
Recorded in perf/results/compare.json.
Read next: perf/peers/visit.py, docs/performance.md.
"""

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import click

from loader.demo import demo_checkpoint
from perf.peers.visit import Contestant, Request, Visit
from perf.record import RESULTS, record

HERE = Path(__file__).parent
DRIVERS = HERE / "peers"
SLOW_SECONDS = 15.0
TTFT_REPEATS, TPOT_REPEATS = 3, 2
METRICS = ("single", "batch", "shared")
WORKLOAD: dict[str, list[Request]] = json.loads((HERE / "workload.json").read_text())

Samples = dict[str, list[float]]


class Column(NamedTuple):
    """A figure of the table, and the samples it is made of."""

    title: str
    samples: str
    digits: int
    convert: Callable[[float], float] = float


COLUMNS = (
    Column("TTFT 512, ms", "ttft_seconds", 0, lambda seconds: seconds * 1e3),
    Column("TPOT, ms", "tpot_seconds", 1, lambda seconds: seconds * 1e3),
    Column("32 mixed, output tok/s", "batch_seconds", 0, lambda seconds: output_tokens(WORKLOAD["batch"]) / seconds),
    Column("16 shared cold, s", "shared_seconds", 2),
    Column("start to first token, s", "start_seconds", 2),
    Column("peak memory, MB", "peak_memory_mb", 0),
    Column("others, cores", "other_cores", 2),
)


def contestants(peers: Path) -> list[Contestant]:
    """All of them; `peers` is the folder that perf/peers/install.sh filled."""
    folder = str(demo_checkpoint())

    def contestant(engine: str, dtype: str, python: str | Path, driver: str, *arguments: str | Path) -> Contestant:
        return Contestant(engine, dtype, [str(part) for part in (python, DRIVERS / driver, *arguments)])

    def openvino(dtype: str) -> Contestant:
        python, gguf = peers / "openvino/bin/python", peers / f"models/{dtype}.gguf"
        return contestant("OpenVINO GenAI", dtype, python, "openvino_genai_pipeline.py", gguf)

    def llama_cpp(dtype: str) -> Contestant:
        server, gguf = peers / "llama.cpp/bin/llama-server", peers / f"models/{dtype}.gguf"
        return contestant("llama.cpp", dtype, sys.executable, "llama_server.py", server, gguf)

    return [
        contestant("engine-llm", "bf16", sys.executable, "engine_llm.py", "bfloat16", folder),
        contestant("engine-llm", "int8", sys.executable, "engine_llm.py", "int8", folder),
        *map(openvino, ("q8_0", "q4_1", "f16")),
        *map(llama_cpp, ("q8_0", "q4_0", "bf16")),
        contestant("vLLM-CPU", "bf16", peers / "vllm-python", "vllm_cpu.py", folder),
    ]


@click.command()
@click.argument("peers", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--only", multiple=True, help="An engine, or an engine and a dtype: `llama.cpp q8_0`; all by default.")
@click.option("--metric", "metrics", multiple=True, type=click.Choice(METRICS), default=METRICS, help="All by default.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--add", is_flag=True, help="Keep the samples of the last record.")
def main(peers: Path, only: Sequence[str], metrics: Sequence[str], rounds: int, add: bool) -> None:
    """Visit every engine in every round; PEERS is the folder that perf/peers/install.sh filled."""
    everybody = contestants(peers)
    names = {name for contestant in everybody for name in (contestant.engine, contestant.name)}
    if unknown := set(only) - names:
        raise click.BadParameter(f"{', '.join(sorted(unknown))}: expected one of {', '.join(sorted(names))}")
    last = json.loads((RESULTS / "compare.json").read_text()) if add else {"versions": {}, "samples": {}}
    versions: dict[str, str] = last["versions"]
    samples: dict[str, Samples] = last["samples"]
    for _ in range(rounds):
        for contestant in everybody:
            if not only or {contestant.engine, contestant.name} & set(only):
                mine = samples.setdefault(contestant.name, {})
                wanted = [metric for metric in metrics if max(mine.get(f"{metric}_seconds", [0])) < SLOW_SECONDS]
                with Visit(contestant, peers / "stderr.log") as visit:
                    versions[contestant.engine] = visit.version
                    measure(visit, wanted, mine)
    rows = [row(contestant, samples[contestant.name]) for contestant in everybody if contestant.name in samples]
    record("compare", rows, title="SmolLM2-135M-Instruct, beside other engines", versions=versions, samples=samples)


def measure(visit: Visit, metrics: Sequence[str], samples: Samples) -> None:
    """Add what one visit gives to `samples`."""

    def note(name: str, *values: float) -> None:
        samples.setdefault(name, []).extend(values)

    note("start_seconds", visit.start_seconds)
    if "single" in metrics:
        prompts = iter(WORKLOAD["single"])  # each is used once, so that no cache helps
        visit.run([next(prompts) | {"max_tokens": 8}])
        ttft = [visit.run([next(prompts) | {"max_tokens": 1}]) for _ in range(TTFT_REPEATS)]
        whole = [visit.run([next(prompts)]) for _ in range(TPOT_REPEATS)]
        between = output_tokens(WORKLOAD["single"][:1]) - 1
        note("ttft_seconds", *ttft)
        note("tpot_seconds", *((seconds - statistics.median(ttft)) / between for seconds in whole))
    if "batch" in metrics:
        seconds = visit.run([request | {"prompt": request["prompt"][::-1]} for request in WORKLOAD["batch"]])
        note("batch_seconds", visit.run(WORKLOAD["batch"]) if seconds < SLOW_SECONDS else seconds)
    if "shared" in metrics:
        note("shared_seconds", visit.run(WORKLOAD["shared"]))
    note("peak_memory_mb", visit.peak_memory_mb)
    note("other_cores", visit.other_cores)


def row(contestant: Contestant, samples: Samples) -> dict[str, str]:
    """A line of the table."""
    cells = {"engine": contestant.engine, "dtype": contestant.dtype}
    return cells | {column.title: cell(column, samples.get(column.samples, [])) for column in COLUMNS}


def cell(column: Column, samples: Sequence[float]) -> str:
    """The median, and the least and the most of several samples."""
    if not samples:
        return ""
    values = sorted(map(column.convert, samples))
    median, least, most = (
        f"{value:,.{column.digits}f}" for value in (statistics.median(values), values[0], values[-1])
    )
    return median if len(values) == 1 else f"{median} ({least} to {most})"


def output_tokens(requests: Sequence[Request]) -> int:
    return sum(request["max_tokens"] for request in requests)


if __name__ == "__main__":
    main()
