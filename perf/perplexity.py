"""What rounding costs: perplexity of the demo model on the licence texts of perf/workload.json, by dtype.

    python -m perf.perplexity

The 42 texts of `single` and `batch`, 64 to 512 tokens each, 13,317 in all, so that a change of 0.1% is more than noise;
the prompt's log-probabilities come from the engine itself.
"""

import json
import math
from pathlib import Path
from typing import Any

from engine import LLM, SamplingParams
from loader.demo import demo_checkpoint
from perf.record import record

MAX_MODEL_LEN = 513
WORKLOAD = json.loads((Path(__file__).parent / "workload.json").read_text())
TEXTS: list[list[int]] = [request["prompt"] for kind in ("single", "batch") for request in WORKLOAD[kind]]
VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8 weights and activations": {"quantization": "int8"},
    "int8 KV": {"kv_cache_dtype": "int8"},
}


def main() -> None:
    rows: list[dict[str, Any]] = []
    for name, settings in VARIANTS.items():
        value = perplexity(settings)
        exact = rows[0]["perplexity"] if rows else value
        rows.append({"dtype": name, "perplexity": round(value, 4), "change": f"{value / exact - 1:+.2%}"})
    record("perplexity", rows, title=f"SmolLM2-135M-Instruct, {sum(map(len, TEXTS))} tokens of licences")


def perplexity(settings: dict[str, Any], texts: int = len(TEXTS)) -> float:
    """exp of the mean negative log-probability of every token but the first of each of so many texts."""
    with LLM(model=str(demo_checkpoint()), device="cpu", max_model_len=MAX_MODEL_LEN, **settings) as llm:
        prompts = [{"prompt_token_ids": ids} for ids in TEXTS[:texts]]
        results = llm.generate(prompts, SamplingParams(max_tokens=0, prompt_logprobs=0), use_tqdm=False)
    total, count = 0.0, 0
    for result in results:
        for token_id, values in zip(result.prompt_token_ids, result.prompt_logprobs or (), strict=True):
            if values is not None:
                total -= values[token_id].logprob
                count += 1
    return math.exp(total / count)


if __name__ == "__main__":
    main()
