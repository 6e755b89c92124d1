"""What rounding costs: perplexity of the demo model on this project's own documentation, by dtype.

    python -m perf.perplexity

Windows of `WINDOW` tokens; the prompt's log-probabilities come from the engine itself.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine import LLM, SamplingParams
from loader.demo import demo_checkpoint
from perf.record import record

WINDOW = 512
WINDOWS = 16
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
    record("perplexity", rows, title=f"SmolLM2-135M-Instruct, docs/, {WINDOWS} windows of {WINDOW} tokens")


def perplexity(settings: dict[str, Any], windows: int = WINDOWS) -> float:
    """exp of the mean negative log-probability of every token but each window's first."""
    with LLM(model=str(demo_checkpoint()), device="cpu", max_model_len=WINDOW + 1, **settings) as llm:
        prompts = [{"prompt_token_ids": ids} for ids in text_windows(llm, windows)]
        results = llm.generate(prompts, SamplingParams(max_tokens=0, prompt_logprobs=0), use_tqdm=False)
    total, count = 0.0, 0
    for result in results:
        for token_id, values in zip(result.prompt_token_ids, result.prompt_logprobs or (), strict=True):
            if values is not None:
                total -= values[token_id].logprob
                count += 1
    return math.exp(total / count)


def text_windows(llm: LLM, windows: int) -> Iterator[list[int]]:
    """The first `windows` windows of docs/, page after page."""
    pages = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    ids = [token_id for page in pages for token_id in llm.encode(page.read_text())]
    for start in range(0, min(windows * WINDOW, len(ids) - WINDOW + 1), WINDOW):
        yield ids[start : start + WINDOW]


if __name__ == "__main__":
    main()
