"""Every kernel that a model may launch, or that there is, to cubins in a folder; needs NVRTC but no GPU."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from engine.config import EngineConfig
from engine.devices import choose_token_budget
from engine.devices.cuda.registry import KernelRegistry, Variant
from engine.devices.cuda.shape import cuda_shape
from engine.devices.cuda.variants import all_variants, model_variants
from engine.errors import ConfigError
from loader.checkpoint import open_checkpoint
from loader.hub import model_folder


def compile_cubins(archs: Sequence[str], folder: Path, config: EngineConfig | None) -> Iterator[str]:
    """Compile into `folder`; a line for people per architecture.

    Args:
        config: of the model to compile for; None compiles all that the tables list.

    Raises:
        ConfigError: an architecture NVRTC does not know, no CuPy or NVRTC, a folder that cannot be written.
        CheckpointError: the model's.
        DeviceFault: a kernel does not compile.
    """
    unknown = [arch for arch in archs if not re.fullmatch(r"(sm|compute)_\d+[af]?", arch)]
    if unknown:
        raise ConfigError(f"arch: {', '.join(map(repr, unknown))}: expected names such as sm_90")
    variants = sorted(_variants(config))
    for arch in archs:
        paths = KernelRegistry(arch, folders=[folder]).compile(variants)
        size = sum(path.stat().st_size for path in set(paths))
        yield f"{arch}: {len(set(paths))} kernels, {size / 2**20:.1f} MiB in {folder}"


def _variants(config: EngineConfig | None) -> set[Variant]:
    if config is None:
        return all_variants()
    checkpoint = open_checkpoint(model_folder(config.model, config.revision))
    config, decoder = choose_token_budget("cuda", config, checkpoint), checkpoint.decoder
    max_model_len = config.max_model_len or decoder.max_position_embeddings
    return model_variants(cuda_shape(config, decoder, num_blocks=1, max_model_len=max_model_len))
