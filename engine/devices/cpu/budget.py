"""The token budget of a step where none is given: what this machine computes in a quarter of a second.

Who decodes waits that long for a token while prompts of others are computed.
What the size changes: docs/performance.md.
"""

from engine.config import EngineConfig
from engine.devices.cpu import numkong
from engine.devices.cpu.memory import available_threads, compute_dtype
from loader.decoder import DecoderConfig
from loader.parameters import parameter_table

STEP_SECONDS = 0.25
LEAST, MOST = 128, 2048


def token_budget(config: EngineConfig, decoder: DecoderConfig) -> int:
    """The largest power of two whose products take at most STEP_SECONDS; at least LEAST, at most MOST."""
    weights = sum(
        shape[0] * shape[1]
        for name, shape in parameter_table(decoder).items()
        if len(shape) == 2 and name.startswith("model.layers.")
    )
    threads = config.cpu_threads or available_threads()
    tokens = int(STEP_SECONDS * threads * _operations_per_second(config) / (2 * weights))
    return min(MOST, max(LEAST, 1 << max(tokens, 1).bit_length() - 1))


def _operations_per_second(config: EngineConfig) -> float:
    """Of one thread's products at 512 rows, as on a Zen 4 at 3.6 GHz; of bfloat16 without its instruction a guess."""
    if config.quantization == "int8":
        return 400e9
    return 220e9 if compute_dtype(config) == "bfloat16" and numkong.has_bfloat16_dot() else 43e9
