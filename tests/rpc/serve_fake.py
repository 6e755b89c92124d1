"""`python -m tests.rpc.serve_fake serve ...`: the real command line over an engine that echoes.

The engine is replaced before the command imports it; a prompt "hold" never gets its answer.
"""

import sys
from types import ModuleType
from typing import Any

from engine.cli import main as cli
from engine.errors import ConfigError
from engine.request.params import SamplingParams
from engine.serving.stream import OutputStream
from tests.rpc.fake_engine import FakeEngine


class EchoEngine(FakeEngine):
    """Answers every prompt with its own text."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if config.model == "/too/big":
            self.load_error = ConfigError("kv_cache_memory_bytes: 1 is less than one block")

    def generate(self, prompt: Any, params: SamplingParams, **more: Any) -> OutputStream:
        stream = super().generate(prompt, params, **more)
        text = "".join(map(chr, prompt[1:]))
        submission = self.live[stream.request_id]
        if text == "hold":
            submission.push("held", [1])
        else:
            submission.finish(text, prompt[1:])
        return stream


if __name__ == "__main__":
    fake: Any = ModuleType("engine.engine")
    fake.Engine = EchoEngine
    sys.modules["engine.engine"] = fake
    cli.main()
