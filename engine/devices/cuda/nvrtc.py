"""NVRTC through CuPy's wrapper: CUDA C to a cubin or PTX, on any machine, with or without a driver."""

from collections.abc import Sequence
from pathlib import Path

from engine.errors import ConfigError, DeviceFault

_MISSING = (
    "NVRTC cannot be loaded ({reason}); install engine-llm[cuda12] or engine-llm[cuda13], or set ENGINE_CUBIN_DIR to a "
    "folder made by `engine compile`"
)


def compile_source(sources: Path, source: str, arch: str, options: Sequence[str]) -> bytes:
    """Compile the file `source` of the folder `sources`, which its includes are relative to.

    Args:
        arch: "sm_90" makes a cubin, "compute_90" makes PTX.

    Raises:
        ConfigError: NVRTC is not installed, or does not know the architecture.
        DeviceFault: the source does not compile; the message is NVRTC's log.
    """
    try:
        from cupy_backends.cuda.libs import nvrtc

        version = nvrtc.getVersion()
        known = {f"{kind}_{number}" for kind in ("sm", "compute") for number in nvrtc.getSupportedArchs()}
    except (ImportError, RuntimeError, OSError) as error:
        raise ConfigError(_MISSING.format(reason=error)) from error
    if arch.rstrip("af") not in known:
        newest = max(known, key=lambda name: (name.startswith("sm"), int(name.split("_")[1])))
        raise ConfigError(f"NVRTC {version[0]}.{version[1]} does not know {arch}, the newest it knows is {newest}")
    program = nvrtc.createProgram((sources / source).read_text(), source, (), ())
    try:
        nvrtc.compileProgram(program, (*options, f"-I{sources}", f"-arch={arch}"))
        if arch.startswith("compute"):
            ptx = nvrtc.getPTX(program)
            return ptx if isinstance(ptx, bytes) else ptx.encode()
        return bytes(nvrtc.getCUBIN(program)) + b"\0"  # CuPy's wrapper drops the last byte, which is a zero
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program).replace(f"{sources}/", "").strip()
        raise DeviceFault(log or str(error)) from error
    finally:
        nvrtc.destroyProgram(program)
