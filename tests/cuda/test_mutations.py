"""Every barrier, wait and commit is needed, and a corrupted asm string is noticed: without it, the checks fail.

Each mutation compiles its kernels anew, so CI takes a sample; `-m cuda_all` takes them all.
"""

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.devices.cuda.ops.gemm import Epilogue
from engine.devices.cuda.registry import SOURCES
from tests.cuda import kernels, test_attention, test_gemm, test_layers, test_sampling
from tests.cuda.kernels import SCHEDULES, CpuRegistry
from tests.devices.driver import GREEDY
from tests.devices.sampling.test_rules import applied
from tests.gpu_without_gpu.executor import LaunchError

SAMPLE = 6
"""One mutation in this many runs in CI."""


def product(kernel: str, m: int, k: int) -> Callable[[], None]:
    def check() -> None:
        for schedule in SCHEDULES:
            test_gemm.test_any_schedule(kernel, m, k, schedule)

    return check


def norm() -> None:
    for schedule in SCHEDULES:
        test_layers.test_a_norm_under_any_schedule_and_in_any_batch(72, schedule)


def filters() -> None:
    for schedule in SCHEDULES:
        test_sampling.test_any_schedule_and_any_batch(schedule)


def logprobs() -> None:
    for schedule in SCHEDULES:
        test_sampling.test_logprobs_ranks_and_alternatives(41, 6, schedule)


def rules() -> None:
    """Every rule next to one that touches the same ids."""
    state: dict[str, Any] = {
        "presence_penalty": 0.3,
        "repetition_penalty": 0.7,
        "bad_words": ((69, 6), (6, 69, 8)),
        "allowed_ids": tuple(range(5, 70)),
        "banned_ids": (68,),
        "min_position": 9,
        "logit_bias": ((67, 1.5), (6, 2.0), (8, 1.0), (68, 1.0)),
        **test_sampling.HISTORY,
    }
    logits = test_sampling.LOGITS
    expected = applied(logits, 5, None, **state)
    for schedule in SCHEDULES:
        registry = CpuRegistry()
        registry.schedule = schedule
        rows = test_sampling.Rows([replace(GREEDY, **state)], len(logits), registry)
        assert rows.sample(logits[None], positions=5)[0] == [int(expected.argmax())]
        np.testing.assert_array_equal(rows.changed[0], expected)


def attention() -> None:
    for schedule in SCHEDULES:
        for config in (test_attention.CONFIGS[0], test_attention.CONFIGS[3]):
            registry = CpuRegistry()
            registry.schedule = schedule
            test_attention.check(registry, config, test_attention.MIXED, test_attention.OPTIONS["all"])


def elements() -> None:
    """Both element types and both weight types through every PTX wrapper that a product uses."""
    for dtype in ("bfloat16", "float16"):
        for int8 in (False, True):
            case = test_gemm.make_case(12, 48, 80, dtype, Epilogue.STORE, True, int8)
            test_gemm.check(CpuRegistry(), case, Epilogue.STORE, test_gemm.SMALL)
        case = test_gemm.make_case(5, 31, 21, dtype, Epilogue.STORE)
        test_gemm.check(CpuRegistry(), case, Epilogue.STORE, test_gemm.V0)


CHECKS: dict[str, Callable[[], None]] = {
    "gemm/v0.cu": product(test_gemm.V0, 17, 35),
    "gemm/v1_small.cu": product(test_gemm.SMALL, 3, 1168),
    "gemm/v1_tiled.cu": product(test_gemm.TILED, 66, 336),
    "common/reduce.cuh": norm,
    "sampling/row.cuh": filters,
    "sampling/select.cuh": filters,
    "sampling/rules.cuh": rules,
    "sampling/v0_sample.cu": filters,
    "sampling/v0_logprobs.cu": logprobs,
    "attention/tile.cuh": attention,
}

SYNCHRONISATION = re.compile(
    r"(__syncthreads|__syncwarp|synchronise<\w+>|cp_async_wait<[^;]*>|cp_async_commit)\(\);|__syncthreads_or\((?P<value>\w+)\)"
)

ASM = [
    ("cvt.rn.bf16.f32", "cvt.rz.bf16.f32"),
    ('"cvt.rn.f16.f32', '"cvt.rz.f16.f32'),
    ("cvt.rn.bf16x2.f32 %0, %1, %2", "cvt.rn.bf16x2.f32 %0, %2, %1"),
    ("cvt.rn.f16x2.f32 %0, %1, %2", "cvt.rn.f16x2.f32 %0, %2, %1"),
    ("[%0], [%1], 16, %2;", "[%0], [%1], 16;"),
    ("valid ? 16 : 0", "valid ? 8 : 0"),
    ("x4.shared.b16 {%0, %1, %2, %3}", "x4.trans.shared.b16 {%0, %1, %2, %3}"),
    ("x4.shared.b16 {%0, %1, %2, %3}", "x4.shared.b16 {%0, %2, %1, %3}"),
    ("f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}", "f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %6, %5, %7}"),
    ("f32.f16.f16.f32 {%0, %1, %2, %3}", "f32.f16.f16.f32 {%0, %1, %3, %2}"),
    ("f32.f16.f16.f32 {%0", "f32.bf16.bf16.f32 {%0"),
    ("cp.async.wait_group %0;", "cp.async.wait_group 7;"),
    ("cp.async.commit_group;", ""),
]


@dataclass(frozen=True, slots=True)
class Mutation:
    """Part [start, end) of a source becomes `text`; `check` must fail then."""

    source: str
    start: int
    end: int
    text: str
    check: Callable[[], None]

    def __str__(self) -> str:
        contents = (SOURCES / self.source).read_text()
        line = contents[: self.start].count("\n") + 1
        return f"{self.source}:{line} {contents[self.start : self.end]!r} -> {self.text!r}"


def mutations() -> Iterator[Mutation]:
    for source, check in CHECKS.items():
        for found in SYNCHRONISATION.finditer((SOURCES / source).read_text()):
            yield Mutation(source, *found.span(), found["value"] or ";", check)
    wrappers = (SOURCES / "common/ptx.cuh").read_text()
    for before, after in ASM:
        start = wrappers.index(before)
        yield Mutation("common/ptx.cuh", start, start + len(before), after, elements)


@pytest.mark.parametrize(
    "mutation",
    [
        pytest.param(mutation, marks=pytest.mark.cuda_all if i % SAMPLE else pytest.mark.cuda, id=str(mutation))
        for i, mutation in enumerate(mutations())
    ],
)
def test_is_noticed(mutation: Mutation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutated = tmp_path / "cuda_src"
    shutil.copytree(SOURCES, mutated)
    contents = (SOURCES / mutation.source).read_text()
    (mutated / mutation.source).write_text(contents[: mutation.start] + mutation.text + contents[mutation.end :])
    monkeypatch.setattr(kernels, "SOURCES", mutated)
    with pytest.raises((LaunchError, AssertionError)):
        mutation.check()


@pytest.mark.cuda
def test_every_file_that_synchronises_is_mutated() -> None:
    files = (path for path in SOURCES.rglob("*.cu*") if path.name != "ptx.cuh")
    found = {path.relative_to(SOURCES).as_posix() for path in files if SYNCHRONISATION.search(path.read_text())}
    assert found == set(CHECKS)
