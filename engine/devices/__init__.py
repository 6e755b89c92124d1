"""Devices: choosing one, its memory facts before anything is loaded, opening it.

Read next: `engine/devices/protocol.py`, what the loop may ask of a device; `engine/models/ops.py`, what a model may.
"""

import logging
from dataclasses import replace
from pathlib import Path

from engine.config import DeviceKind, EngineConfig
from engine.devices.memory import MemoryFacts
from engine.devices.protocol import Device
from engine.errors import ConfigError
from loader.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

NVIDIA = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""What is there where the kernel has an NVIDIA GPU, on Linux and in WSL."""


def select_device(kind: DeviceKind) -> str:
    """The device that `kind` stands for; auto is cuda where it works, else cpu.

    Why not cuda is logged, as a warning where the machine has an NVIDIA device. Raises ConfigError when cuda is
    wanted and something is missing.
    """
    device, reason = _resolve(kind)
    if reason is not None:
        level = logging.WARNING if any(path.exists() for path in NVIDIA) else logging.INFO
        logger.log(level, "the model runs on the cpu: %s", reason)
    return device


def _resolve(kind: DeviceKind) -> tuple[str, str | None]:
    """The device, and why it is not cuda where that was tried."""
    from engine.devices.cuda.discovery import find_gpu

    if kind == "cpu":
        return "cpu", None
    try:
        find_gpu()
    except ConfigError as error:
        if kind == "cuda":
            raise
        return "cpu", str(error)
    return "cuda", None


def choose_token_budget(kind: str, config: EngineConfig, checkpoint: Checkpoint) -> EngineConfig:
    """The config with `max_num_batched_tokens` set."""
    if config.max_num_batched_tokens is not None:
        return config
    if kind == "cuda":
        from engine.devices.cuda.shape import TOKEN_BUDGET as budget
    else:
        from engine.devices.cpu.budget import token_budget

        budget = token_budget(config, checkpoint.decoder)
    return replace(config, max_num_batched_tokens=max(budget, config.max_num_seqs))


def memory_facts(kind: str, config: EngineConfig, checkpoint: Checkpoint) -> MemoryFacts:
    """What the model needs on the device and what is there, in bytes. Raises ConfigError."""
    if kind == "cuda":
        from engine.devices.cuda.memory import cuda_memory_facts

        return cuda_memory_facts(config, checkpoint.decoder)
    from engine.devices.cpu.memory import cpu_memory_facts

    return cpu_memory_facts(config, checkpoint.decoder)


async def open_device(config: EngineConfig, checkpoint: Checkpoint, *, num_blocks: int, max_model_len: int) -> Device:
    """Start the device and load the model. Raises ConfigError, CheckpointError or DeviceFault."""
    if _resolve(config.device)[0] == "cuda":
        from engine.devices.cuda.device import CudaDevice
        from engine.devices.cuda.shape import cuda_shape

        cuda = cuda_shape(config, checkpoint.decoder, num_blocks=num_blocks, max_model_len=max_model_len)
        return await CudaDevice.open(cuda, checkpoint.path, config.load_format, config.seed)
    from engine.devices.cpu.device import CpuDevice
    from engine.devices.cpu.memory import model_shape
    from engine.devices.cpu.messages import Open
    from engine.devices.cpu.ring import RingLimits

    shape = model_shape(config, checkpoint.decoder, num_blocks=num_blocks, max_model_len=max_model_len)
    limits = RingLimits(
        rows=config.max_num_seqs,
        tokens=config.token_budget,
        top=config.max_logprobs,
        vocab=checkpoint.decoder.vocab_size,
    )
    return await CpuDevice.open(Open(shape, checkpoint.path, config.load_format, config.seed, limits))
