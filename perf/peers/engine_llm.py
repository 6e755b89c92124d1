"""This engine, offline API. Usage: engine_llm.py DTYPE FOLDER, with the interpreter it is installed in."""

import sys
from importlib.metadata import version

from driver import serve

from engine import LLM, SamplingParams

KV_CACHE_BYTES = 288 << 20
"""13,100 tokens of SmolLM2-135M; the 32 mixed requests have 10,518 at their end."""


def main(dtype: str, model: str) -> None:
    kind = {"quantization": "int8"} if dtype == "int8" else {"dtype": dtype}

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        results = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            [SamplingParams(temperature=0, max_tokens=number, ignore_eos=True) for number in max_tokens],
            use_tqdm=False,
        )
        return [list(result.outputs[0].token_ids) for result in results]

    limits = {"max_model_len": 2048, "max_num_seqs": 64, "kv_cache_memory_bytes": KV_CACHE_BYTES}
    with LLM(model, device="cpu", **limits, **kind) as llm:
        serve(version("engine-llm"), generate)


if __name__ == "__main__":
    main(*sys.argv[1:])
