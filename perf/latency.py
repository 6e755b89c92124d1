"""One request at a time on the demo model: start to first token, TTFT and TPOT, by dtype.

    python -m perf.latency [bfloat16 int8 float32 ...]

TTFT is of 512 prompt tokens that no cache holds; TPOT is the mean over the 128 tokens behind them.
Prompts are random ids: what the ids are does not change the work. Medians of `REPEATS`.
"""

import random
import statistics
import subprocess
import sys
from time import perf_counter
from typing import Any

from engine import LLM, SamplingParams
from loader.demo import demo_checkpoint
from perf.record import record

PROMPT_TOKENS = 512
OUTPUT_TOKENS = 128
REPEATS = 5
FIRST_TOKEN = "first token"


def main() -> None:
    if sys.argv[1:2] == ["--first-token"]:
        return first_token(sys.argv[2])
    rows = [measure(dtype) for dtype in sys.argv[1:] or ["bfloat16", "int8"]]
    record("latency", rows, title="SmolLM2-135M-Instruct, one request at a time")


def measure(dtype: str) -> dict[str, Any]:
    starts = [start_seconds(dtype) for _ in range(3)]
    with load(dtype) as llm:
        run(llm, 8)
        ttft = [run(llm, 1) for _ in range(REPEATS)]
        total = [run(llm, OUTPUT_TOKENS) for _ in range(REPEATS)]
    first = statistics.median(ttft)
    return {
        "dtype": dtype,
        "start to first token, s": round(statistics.median(starts), 2),
        f"TTFT {PROMPT_TOKENS}, ms": round(first * 1e3, 1),
        "TPOT, ms": round((statistics.median(total) - first) / (OUTPUT_TOKENS - 1) * 1e3, 2),
    }


def load(dtype: str) -> LLM:
    """The demo model; "int8" is int8 weights and activations beside bfloat16."""
    kind = {"quantization": "int8"} if dtype == "int8" else {"dtype": dtype}
    return LLM(model=str(demo_checkpoint()), device="cpu", max_model_len=2048, **kind)


def run(llm: LLM, num_tokens: int) -> float:
    """Seconds for one request with a new prompt."""
    prompt = [random.randrange(100, 40_000) for _ in range(PROMPT_TOKENS)]
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    begin = perf_counter()
    llm.generate([{"prompt_token_ids": prompt}], params)
    return perf_counter() - begin


def start_seconds(dtype: str) -> float:
    """From the start of a process to its first token."""
    begin = perf_counter()
    command = [sys.executable, "-m", "perf.latency", "--first-token", dtype]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert FIRST_TOKEN in process.stdout.readline()
        return perf_counter() - begin


def first_token(dtype: str) -> None:
    with load(dtype) as llm:
        llm.generate([{"prompt_token_ids": [504, 3575, 282, 4649, 314]}], SamplingParams(temperature=0, max_tokens=1))
        print(FIRST_TOKEN, flush=True)


if __name__ == "__main__":
    main()
