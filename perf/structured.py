"""What structured output costs: rows under JSON schemas against as many free rows that make as many tokens.

    python -m perf.structured [--rows 32] [--tokens 128] [--rounds 3] [--quantization int8]

The demo model on the cpu device, through the offline API. The schemas want more than the tokens allowed, and the
model's end does not end anything, so that both ways make `rows` * `tokens` tokens in the same steps. The ways take
turns, after one round to warm up; a time is the least of its rounds. Recorded in perf/results/structured.json.
Read next: docs/structured-output.md, `engine/grammar/masks.py`.
"""

from time import perf_counter
from typing import Any

import click

from engine import LLM, SamplingParams, StructuredOutputs
from loader.demo import demo_checkpoint
from perf.record import record


def _list_of(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1000}


SCHEMAS = [
    _list_of({"type": "string"}),
    _list_of({"type": "integer"}),
    _list_of({"enum": ["red", "green", "blue"]}),
    _list_of(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 20},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
                "tags": {"type": "array", "items": {"enum": ["new", "old"]}},
            },
            "required": ["name", "zip", "tags"],
            "additionalProperties": False,
        }
    ),
]


@click.command()
@click.option("--rows", default=32, show_default=True, help="Requests at once.")
@click.option("--tokens", default=128, show_default=True, help="Tokens of each.")
@click.option("--rounds", default=3, show_default=True, help="Turns of each way.")
@click.option("--quantization", help="Of the weights, as in `engine serve`.")
def main(rows: int, tokens: int, rounds: int, quantization: str | None) -> None:
    """Measure both ways, greedy and sampled, and record them."""
    settings: dict[str, Any] = {} if quantization is None else {"quantization": quantization}
    with LLM(str(demo_checkpoint()), device="cpu", max_num_seqs=rows, max_model_len=tokens + 64, **settings) as llm:
        table = [row for temperature in (0.0, 1.0) for row in measure(llm, rows, tokens, rounds, temperature)]
    dtype = quantization or "bfloat16"
    record("structured", table, title=f"{rows} rows of {tokens} tokens, {dtype}", rows_at_once=rows, tokens=tokens)


def measure(llm: LLM, rows: int, tokens: int, rounds: int, temperature: float) -> list[dict[str, Any]]:
    """Free rows, then rows under schemas."""
    common: dict[str, Any] = {"temperature": temperature, "max_tokens": tokens, "ignore_eos": True}
    schemas = [StructuredOutputs(json=schema) for schema in SCHEMAS]
    ways = {
        "free": [SamplingParams(seed=i, **common) for i in range(rows)],
        "JSON schema": [
            SamplingParams(seed=i, **common, structured_outputs=schemas[i % len(schemas)]) for i in range(rows)
        ],
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(1 + rounds):
        for name, params in ways.items():
            times[name].append(timed(llm, params, tokens))
    least = {name: min(seconds[1:]) for name, seconds in times.items()}
    return [
        {
            "rows": name,
            "temperature": temperature,
            "s": round(seconds, 3),
            "tokens/s": round(rows * tokens / seconds),
            "throughput lost": f"{1 - least['free'] / seconds:.1%}",
        }
        for name, seconds in least.items()
    ]


def timed(llm: LLM, params: list[SamplingParams], tokens: int) -> float:
    """Seconds until every request has its tokens."""
    prompts = [f"Here is list number {i} in JSON: " for i in range(len(params))]
    llm.reset_prefix_cache()
    began = perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = perf_counter() - began
    if any(len(out.outputs[0].token_ids) != tokens for out in outputs):
        raise RuntimeError("an output ended early, so that the ways cannot be compared")
    return seconds


if __name__ == "__main__":
    main()
