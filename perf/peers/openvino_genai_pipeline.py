"""OpenVINO GenAI's ContinuousBatchingPipeline, 512 tokens a step. Usage: openvino_genai_pipeline.py GGUF"""

import sys
from importlib.metadata import version

import numpy as np
import openvino as ov
import openvino_genai as genai
from driver import serve


def main(gguf: str) -> None:
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1  # GB
    scheduler.enable_prefix_caching = True
    scheduler.max_num_batched_tokens = 512
    scheduler.max_num_seqs = 64
    pipeline = genai.ContinuousBatchingPipeline(gguf, scheduler, "CPU", {})

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        inputs = [ov.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        results = pipeline.generate(inputs, [_greedy(number) for number in max_tokens])
        return [list(result.m_generation_ids[0]) for result in results]

    serve(version("openvino-genai"), generate)


def _greedy(max_tokens: int) -> genai.GenerationConfig:
    return genai.GenerationConfig(
        max_new_tokens=max_tokens,
        min_new_tokens=max_tokens,
        ignore_eos=True,
        do_sample=False,
        apply_chat_template=False,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
