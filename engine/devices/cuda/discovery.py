"""What stands between this machine and the cuda device: one line that says what to do, or nothing."""

from engine.errors import ConfigError

EXTRAS = "engine-llm[cuda13] (driver 580 or newer) or engine-llm[cuda12]"


def find_gpu() -> None:
    """Return if the device can be used. Raises ConfigError with what is missing and what to do about it."""
    try:
        import cupy
    except ImportError as error:
        raise ConfigError(f"device: cuda needs CuPy ({error}); install {EXTRAS}") from error
    except OSError as error:  # it makes its cache folder when it is imported
        raise ConfigError(f"device: CuPy cannot be loaded ({error}); set CUPY_CACHE_DIR to a folder") from error
    runtime = cupy.cuda.runtime
    driver, needed = runtime.driverGetVersion(), runtime.runtimeGetVersion() // 1000 * 1000
    if driver == 0:
        raise ConfigError("device: cuda needs an NVIDIA driver, and this machine has none; install it, or use cpu")
    if driver < needed:
        raise ConfigError(
            f"device: the driver is for CUDA {_version(driver)}, this CuPy needs {_version(needed)} or newer; "
            f"update the driver or install {EXTRAS}"
        )
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        raise ConfigError(f"device: the driver finds no usable GPU: {error}") from error
    if count == 0:
        raise ConfigError("device: the driver finds no GPU; check CUDA_VISIBLE_DEVICES, or use cpu")
    capability = cupy.cuda.Device().compute_capability
    if int(capability) < 80:
        raise ConfigError(f"device: the GPU has compute capability {capability}, the kernels need 80 or newer")


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
