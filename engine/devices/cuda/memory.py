"""Memory facts of the cuda device: what the model will take, and what this GPU has."""

from engine.config import EngineConfig
from engine.devices.cuda.buffers import buffer_specs, specs_nbytes
from engine.devices.cuda.rows import row_specs
from engine.devices.cuda.shape import cuda_shape
from engine.devices.cuda.weights import weights_nbytes
from engine.devices.memory import MemoryFacts
from loader.decoder import DecoderConfig


def cuda_memory_facts(config: EngineConfig, decoder: DecoderConfig) -> MemoryFacts:
    """Facts before anything is loaded. Raises ConfigError for a model the kernels cannot run."""
    max_model_len = config.max_model_len or decoder.max_position_embeddings
    shape = cuda_shape(config, decoder, num_blocks=1, max_model_len=max_model_len)
    return MemoryFacts(
        available=_available_bytes(config.gpu_memory_utilization),
        weights=weights_nbytes(shape),
        workspace=specs_nbytes(buffer_specs(shape)) + specs_nbytes(row_specs(shape)),
        block=shape.block_nbytes,
        dedicated=True,
    )


def _available_bytes(utilization: float) -> int:
    """The engine's share of the GPU, less what others (and the CUDA context) hold already."""
    import cupy

    free, total = map(int, cupy.cuda.runtime.memGetInfo())
    return max(0, int(total * utilization) - (total - free))
