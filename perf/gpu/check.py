"""`perf/gpu/check.sh`: is what was proven on the CPU true on this GPU? Checks first, then first timings.

    1. the PTX wrappers against the executor's recorded answers
    2. each family's kernels against float64
    3. a row's bits wherever it lies
    4. golden models through the whole executor
    5. the whole engine: golden ids, company, a second engine in one process
    6. timings of kernels, then of the engine on random weights

Prints a line per case and writes everything as JSON. Exit code 1 if any check failed.
"""

import argparse
import json
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from engine.devices.cuda.discovery import find_gpu
from engine.devices.cuda.registry import KernelRegistry
from engine.errors import EngineError
from perf.gpu.card import CardRegistry
from perf.gpu.engine import ENGINE_CHECKS, GEOMETRIES, speed
from perf.gpu.golden import NAMES, check_golden
from perf.gpu.invariance import INVARIANCE
from perf.gpu.kernels import CHECKS, DTYPES
from perf.gpu.ptx import RECORDED, answers, differences
from perf.gpu.timings import timings

Cases = Iterator[tuple[str, float]]


def main() -> None:
    options = _options()
    try:
        find_gpu()
    except EngineError as error:
        sys.exit(f"perf/gpu/check.sh: {error}")
    report: dict[str, Any] = {"machine": _machine(), "date": time.strftime("%Y-%m-%d"), "commit": options.commit}
    report |= {"checks": [], "failed": []}
    arch = options.arch or f"sm_{report['machine']['compute_capability']}"
    for name, cases in _phases(arch, options.prompts):
        if re.search(options.only, name):
            _run(name, cases, report)
    if not options.no_timings:
        _time(arch, report)
        _time_engine(report)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=2) + "\n")
    print(f"{len(report['failed'])} of {len(report['checks'])} checks failed; {options.output} has the report")
    sys.exit(1 if report["failed"] else 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Check the CUDA device on this machine's GPU.")
    parser.add_argument("--output", type=Path, default=Path("perf/results/gpu.json"))
    parser.add_argument("--commit", default="", help="to be recorded")
    parser.add_argument("--arch", help="compile for this instead of the GPU's own architecture")
    parser.add_argument("--prompts", type=int, default=7, help="of each golden model")
    parser.add_argument("--only", default="", metavar="PATTERN", help="phases whose name has this regular expression")
    parser.add_argument("--no-timings", action="store_true")
    return parser.parse_args()


def _phases(arch: str, prompts: int) -> Iterator[tuple[str, Callable[[], Cases]]]:
    yield "ptx", lambda: _check_ptx(arch)
    card = CardRegistry(arch)
    for check in (*CHECKS, *INVARIANCE):
        for dtype in DTYPES:
            yield f"{check.__name__} {dtype}", lambda check=check, dtype=dtype: check(card, dtype)  # type: ignore[misc]
    for name in NAMES:
        yield f"golden {name}", lambda name=name: check_golden(KernelRegistry(arch), name, prompts)  # type: ignore[misc]
    for name, engine_check in ENGINE_CHECKS.items():
        yield f"engine {name}", engine_check


def _run(name: str, cases: Callable[[], Cases], report: dict[str, Any]) -> None:
    """Every case of a phase; what raises has failed, and the next phase runs."""
    began = time.perf_counter()
    try:
        results = list(cases())
    except Exception as error:
        results = [(f"{type(error).__name__}: {error}", np.inf)]
    for case, share in ((case, float(share)) for case, share in results):
        failed = not share <= 1
        report["checks"].append(
            {"phase": name, "case": case, "error": None if failed and not share < np.inf else share}
        )
        if failed:
            report["failed"].append(f"{name}: {case}")
        print(f"{'FAILED' if failed else 'ok':>6} {share:8.3f} of its bound  {name}: {case}")
    print(f"       {time.perf_counter() - began:.1f} s  {name}", flush=True)


def _time(arch: str, report: dict[str, Any]) -> None:
    report["timings"] = []
    try:
        for record in timings(KernelRegistry(arch)):
            report["timings"].append(record)
            print(
                "  " + "  ".join(f"{v:.4g} {k}" if isinstance(v, float) else v for k, v in record.items()), flush=True
            )
    except Exception as error:
        report["failed"].append(f"timings: {type(error).__name__}: {error}")


def _time_engine(report: dict[str, Any]) -> None:
    report["engine"] = {}
    for name in GEOMETRIES:
        try:
            report["engine"][name] = speed(name)
            print(json.dumps({name: report["engine"][name]}, indent=1), flush=True)
        except Exception as error:
            report["failed"].append(f"engine {name}: {type(error).__name__}: {error}")


def _check_ptx(arch: str) -> Cases:
    registry = CardRegistry(arch)

    def launch(name: str, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...]) -> None:
        registry.get("../perf/gpu/ptx.cu", name)(grid, block, args, stream=None)

    problems = differences(answers(launch), dict(np.load(RECORDED)))
    yield "; ".join(problems) or "every wrapper", 2.0 * len(problems)


def _machine() -> dict[str, Any]:
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(0)
    return {
        "gpu": properties["name"].decode(),
        "compute_capability": cupy.cuda.Device().compute_capability,
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "cuda": cupy.cuda.runtime.runtimeGetVersion(),
        "cupy": cupy.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    main()
