"""A workload on an engine in this process. Read next: `engine/cli/bench/workload.py` (what it is made of)."""

import asyncio

from engine.cli.bench.workload import Workload
from engine.engine import Engine
from engine.errors import ConfigError
from engine.request.params import SamplingParams
from engine.serving.stream import OutputStream

WARMUP_TOKENS = 16


async def warm_up(engine: Engine) -> None:
    """Touch everything once, so that first uses do not count, and leave no trace in the prefix cache."""
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, detokenize=False)
    await _read(engine.generate([0] * min(WARMUP_TOKENS, engine.info.max_model_len - 2), params))
    await engine.reset_prefix_cache()


async def run(engine: Engine, workload: Workload) -> None:
    """Send the workload's requests, sampled greedily, and read every stream to its end.

    Raises ConfigError when the requests are longer than the engine takes.
    """
    if workload.max_len > engine.info.max_model_len:
        raise ConfigError(
            f"input_len + output_len: {workload.max_len} is more than max_model_len {engine.info.max_model_len}"
        )
    requests = workload.requests(engine.info.vocab_size)
    loop = asyncio.get_running_loop()
    start = loop.time()
    async with asyncio.TaskGroup() as group:
        for request in requests:
            if (wait := start + request.at - loop.time()) > 0:
                await asyncio.sleep(wait)
            params = SamplingParams(max_tokens=request.output_len, temperature=0.0, ignore_eos=True)
            group.create_task(_read(engine.generate(request.prompt, params)))


async def _read(stream: OutputStream) -> None:
    async for _ in stream:
        pass
