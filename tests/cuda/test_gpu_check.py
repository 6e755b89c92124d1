"""What `perf/gpu/check.sh` will run on a GPU, run here: its records are the executor's, its checks can fail."""

import re
from typing import Any

import numpy as np
import pytest

from engine.devices.cuda.registry import SOURCES, KernelRegistry
from perf.gpu import ptx
from perf.gpu.card import CardRegistry
from perf.gpu.golden import check_golden
from perf.gpu.kernels import check_layers, check_rope
from tests.cuda.generating import ARCH, gpu

pytest.importorskip("cupy", reason="the double stands on CuPy's NVRTC wrapper: install the extra test-cuda")
pytestmark = pytest.mark.cuda


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> ptx.Arrays:
    with gpu(monkeypatch):
        registry = CardRegistry(ARCH)

        def launch(name: str, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...]) -> None:
            registry.get("../perf/gpu/ptx.cu", name)(grid, block, args, stream=None)

        return ptx.answers(launch)


def test_recorded_answers_are_the_executors(answers: ptx.Arrays) -> None:
    """`python -m perf.gpu.ptx` records them anew."""
    recorded = dict(np.load(ptx.RECORDED))
    assert answers.keys() == recorded.keys()
    for name, values in answers.items():
        assert values.tobytes() == recorded[name].tobytes(), name
    assert ptx.differences(answers, recorded) == []


def test_a_nan_is_the_one_that_a_card_makes() -> None:
    """cvt.f32.f16 on an H200; what the executor said before came from the host."""
    values = np.load(ptx.RECORDED)["from_f16"]
    nans = values.view(np.uint32)[np.isnan(values)]
    assert len(nans) > 10 and set(nans.tolist()) == {0x7FFFFFFF}


@pytest.mark.parametrize("name", [*ptx.EXACT, "ex2", "mma_bf16", "mma_f16"])
def test_a_wrong_answer_is_reported(answers: ptx.Arrays, name: str) -> None:
    wrong = answers[name].copy()
    if name in ptx.EXACT:
        wrong.view(np.uint8).ravel()[0] ^= 1
    else:
        wrong *= np.float32(1 + 2.0**-10)
    problems = ptx.differences(answers | {name: wrong}, dict(np.load(ptx.RECORDED)))
    assert len(problems) == 1 and problems[0].startswith(name)


def test_every_wrapper_is_asked() -> None:
    wrappers = re.findall(r"^DEVICE \w+ (\w+)\(", (SOURCES / "common" / "ptx.cuh").read_text(), re.MULTILINE)
    assert len(wrappers) > 10
    asked = ptx.SOURCE.read_text()
    assert [name for name in wrappers if name not in asked] == []


def test_kernels_and_a_golden_model(monkeypatch: pytest.MonkeyPatch) -> None:
    with gpu(monkeypatch):
        card = CardRegistry(ARCH)
        cases = [*check_rope(card, "bfloat16"), *check_layers(card, "float16")]
        for name in ("llama-bias", "qwen2", "qwen3", "mistral-window", "phi3", "smollm3", "granite"):
            cases += check_golden(KernelRegistry(ARCH), name, prompts=2)
    assert len(cases) == 34
    assert all(error <= 1 for _, error in cases), cases
