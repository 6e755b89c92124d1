"""Devices: choosing one, its memory facts before anything is loaded, opening it.

Read next: `engine/devices/protocol.py`, what the loop may ask of a device; `engine/devices/ops.py`, what a model may.
"""

from engine.config import DeviceKind, EngineConfig
from engine.devices.protocol import Device
from engine.errors import ConfigError
from engine.memory import MemoryFacts
from loader.checkpoint import Checkpoint


def select_device(kind: DeviceKind) -> str:
    """The device that `kind` stands for. Raises ConfigError for one that does not exist."""
    if kind == "cuda":
        raise ConfigError("device: cuda does not exist in this version, use cpu or auto")
    return "cpu"


def memory_facts(kind: str, config: EngineConfig, checkpoint: Checkpoint) -> MemoryFacts:
    """What the model needs on the device and what is there, in bytes. Raises ConfigError."""
    from engine.devices.cpu.memory import cpu_memory_facts

    assert kind == "cpu"
    return cpu_memory_facts(config, checkpoint.decoder)


async def open_device(config: EngineConfig, checkpoint: Checkpoint, *, num_blocks: int, max_model_len: int) -> Device:
    """Start the device and load the model. Raises ConfigError, CheckpointError or DeviceFault."""
    from engine.devices.cpu.device import CpuDevice
    from engine.devices.cpu.memory import model_shape
    from engine.devices.cpu.messages import Open
    from engine.devices.cpu.ring import RingLimits

    select_device(config.device)
    shape = model_shape(config, checkpoint.decoder, num_blocks=num_blocks, max_model_len=max_model_len)
    limits = RingLimits(
        rows=config.max_num_seqs,
        tokens=config.max_num_batched_tokens,
        top=config.max_logprobs,
        vocab=checkpoint.decoder.vocab_size,
    )
    return await CpuDevice.open(Open(shape, checkpoint.path, config.load_format, config.seed, limits))
