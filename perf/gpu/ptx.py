"""The PTX wrappers: inputs, how to run them, and what the executor said (`ptx.npz`, written by this module).

python -m perf.gpu.ptx    runs them on the CPU executor and records its answers; needs g++ and NVRTC, no GPU
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

SOURCE = Path(__file__).with_name("ptx.cu")
RECORDED = Path(__file__).with_name("ptx.npz")

Arrays = dict[str, NDArray[Any]]
Launch = Callable[[str, tuple[int, ...], tuple[int, ...], tuple[Any, ...]], None]
"""Kernel, grid, block and arguments, NumPy arrays that are written in place."""

EXACT = ("bf16", "f16", "bf16x2", "f16x2", "from_bf16", "from_f16", "matrix", "transposed", "copied")


def answers(launch: Launch) -> Arrays:
    """Outputs of both kernels by name."""
    x, tiles = _floats(), _tiles()
    n = len(x)
    kinds = {"bf16": np.uint16, "f16": np.uint16, "bf16x2": np.uint32, "f16x2": np.uint32}
    out: Arrays = {name: np.zeros(n, kind) for name, kind in kinds.items()}
    out |= {name: np.zeros(n, np.float32) for name in ("from_bf16", "from_f16", "ex2")}
    launch("conversions", (-(-n // 128),), (128,), (x, *out.values(), np.int32(n)))
    loads: Arrays = {"matrix": np.zeros(128, np.uint32), "transposed": np.zeros(128, np.uint32)}
    loads |= {"copied": np.zeros(64, np.uint32)}
    sums: Arrays = {"mma_bf16": np.zeros((16, 8), np.float32), "mma_f16": np.zeros((16, 8), np.float32)}
    launch("tiles", (1,), (32,), (*tiles, *loads.values(), *sums.values()))
    return out | loads | sums


def differences(got: Arrays, recorded: Arrays) -> list[str]:
    """What a GPU answered otherwise than it may: names and how much."""
    problems = [
        f"{name}: {np.count_nonzero(_bits(got[name]) != _bits(recorded[name]))} of {got[name].size} differ"
        for name in EXACT
        if not np.array_equal(_bits(got[name]), _bits(recorded[name]))
    ]
    with np.errstate(all="ignore"):  # NaNs among the inputs
        exact = np.exp2(_floats().astype(np.float64))
    inside = np.isfinite(exact) & (exact > 2.0**-120) & (exact < 2.0**120)
    error = np.abs(got["ex2"][inside] / exact[inside] - 1).max()
    if error > 2.0**-22:  # PTX ISA: 2 ulp
        problems.append(f"ex2: relative error {error:.3g}")
    for name, (a, b) in {"mma_bf16": _tiles()[:2], "mma_f16": _tiles()[2:]}.items():
        kind = ml_dtypes.bfloat16 if name == "mma_bf16" else np.float16
        wide = [side.view(kind).astype(np.float64) for side in (a, b)]
        bound = (np.abs(wide[0]) @ np.abs(wide[1]).T) * 16 * 2.0**-23  # products are added in an order of its own
        error = np.abs(got[name] - wide[0] @ wide[1].T)
        if not (error <= bound).all():
            problems.append(f"{name}: error up to {(error / bound).max():.3g} of its bound")
    return problems


def _bits(array: NDArray[Any]) -> NDArray[Any]:
    return array.view({2: np.uint16, 4: np.uint32}[array.itemsize])


def _floats() -> NDArray[np.float32]:
    """Random floats of every size, and those at which rounding is decided."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, 2000, np.uint64).astype(np.uint32)
    special = [
        0.0,
        -0.0,
        np.inf,
        -np.inf,
        np.nan,
        1.0,
        65504.0,
        65519.9,
        65520.0,
        3.4e38,
        1e-45,
        6e-8,
        5.96e-8,
        2.0**-24,
    ]
    ties = np.uint32(0x3F800000) + np.array([0x8000, 0x18000, 0x7FFF, 0x8001, 0x1000, 0x3000], np.uint32)
    return np.concatenate([bits.view(np.float32), np.array(special, np.float32), ties.view(np.float32)])


def _tiles() -> tuple[NDArray[np.uint16], ...]:
    rng = np.random.default_rng(1)
    shapes = ((16, 16), (8, 16))
    kinds = (ml_dtypes.bfloat16, np.float16)
    return tuple(rng.standard_normal(shape).astype(kind).view(np.uint16) for kind in kinds for shape in shapes)


def _record() -> None:
    from engine.devices.cuda.registry import SOURCES
    from tests.gpu_without_gpu import executor

    module = executor.compile_file(SOURCE, (f"-I{SOURCES}", "-ftz=false", "-std=c++17", "-default-device"))

    def launch(name: str, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...]) -> None:
        module.kernel(name).launch(grid, block, args)

    recorded = answers(launch)
    problems = differences(recorded, recorded)
    assert not problems, problems
    np.savez_compressed(RECORDED, allow_pickle=False, **recorded)


if __name__ == "__main__":
    _record()
