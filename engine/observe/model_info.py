"""ModelInfo: what is being served, as GetInfo, `/v1/models` and the metrics' labels tell it."""

from dataclasses import dataclass
from pathlib import Path

from engine import __version__
from engine.config import EngineConfig
from engine.devices.memory import MemoryLedger
from engine.devices.protocol import DeviceInfo
from loader.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What is being served.

    Attributes:
        served_model_names: what clients may call it; at least one.
    """

    model: str
    served_model_names: tuple[str, ...]
    architecture: str
    vocab_size: int
    max_model_len: int
    dtype: str
    device: str
    num_blocks: int
    block_size: int
    version: str

    @property
    def served_model_name(self) -> str:
        """What answers and metrics call it."""
        return self.served_model_names[0]


def _own_name(model: str) -> str:
    """A folder's or a file's last part; of what was fetched by name, that name."""
    path = Path(model)
    return path.resolve().name if path.is_dir() else path.stem if path.is_file() else model


def model_info(config: EngineConfig, checkpoint: Checkpoint, ledger: MemoryLedger, device: DeviceInfo) -> ModelInfo:
    """The facts of an engine that has started."""
    decoder = checkpoint.decoder
    return ModelInfo(
        model=config.model,
        served_model_names=tuple(config.served_model_names or [_own_name(config.model)]),
        architecture=decoder.architecture,
        vocab_size=decoder.vocab_size,
        max_model_len=ledger.max_model_len,
        dtype=device.dtype,
        device=f"{device.kind}: {device.name}",
        num_blocks=ledger.num_blocks,
        block_size=config.block_size,
        version=__version__,
    )
