"""What a script leaves behind when it stops reading in the middle of an answer: nothing, not even a line."""

import subprocess
import sys
from pathlib import Path

LLAMA = Path(__file__).parents[1] / "golden" / "llama"

SCRIPT = f"""
import asyncio
from engine import Engine, EngineConfig, SamplingParams

async def main():
    config = EngineConfig(model={str(LLAMA)!r}, max_model_len=512, device="cpu")
    async with Engine(config) as engine:
        stream = engine.generate([1, 2, 3], SamplingParams(max_tokens=400, ignore_eos=True))
        async for delta in stream:
            print(len(delta.token_ids))
            break

asyncio.run(main())
"""


def test_a_worker_left_in_mid_step_ends_in_silence() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert int(done.stdout) >= 1
    (line,) = done.stderr.splitlines()
    assert line.endswith("chats are refused")  # the model has no tokenizer
