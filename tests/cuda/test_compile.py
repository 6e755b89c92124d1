"""`engine compile`, and that its lists hold all that a model launches."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from engine.cli.main import cli
from engine.config import EngineConfig
from engine.devices import memory_facts
from engine.devices.cuda.registry import KernelRegistry, Variant
from engine.devices.cuda.variants import all_variants, model_variants
from engine.errors import ConfigError
from loader.checkpoint import open_checkpoint
from loader.weights import plan_weights
from tests.conftest import GOLDEN
from tests.cuda.generating import ARCH, gpu
from tests.cuda.test_device import Waiting, shape
from tests.devices.driver import GREEDY, Driver

pytest.importorskip("cupy", reason="kernels are compiled through CuPy's NVRTC wrapper: install the extra test-cuda")
pytestmark = pytest.mark.cuda

MODEL = GOLDEN / "llama"


def test_a_models_cubins_are_all_that_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cubins"
    result = CliRunner().invoke(cli, ["compile", "--arch", "sm_90", "-o", str(folder), "--model", str(MODEL)])
    assert result.exit_code == 0, result.output
    wanted = model_variants(shape())
    assert len(list(folder.iterdir())) == len(wanted) and f"sm_90: {len(wanted)} kernels" in result.output
    monkeypatch.setattr("engine.devices.cuda.registry.compile_source", None)  # whatever compiles fails
    assert len(KernelRegistry("sm_90", folders=[folder, tmp_path / "none"]).compile(wanted)) == len(wanted)


def test_a_wrong_architecture_is_refused_before_anything_is_compiled(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["compile", "--arch", "sm_90,hopper", "-o", str(tmp_path / "cubins")])
    assert result.exit_code == 2 and "hopper" in result.output
    assert not (tmp_path / "cubins").exists()


@pytest.mark.parametrize(
    "kinds", [{}, {"kv_int8": True, "weight_int8": True, "dtype": "float16"}], ids=["plain", "int8"]
)
def test_no_step_compiles(kinds: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of few and many rows, chunks and decodes over several splits, rules, histories, log-probabilities."""
    from engine.devices.cuda.executor import CudaExecutor

    decoder = open_checkpoint(MODEL).decoder
    state = replace(GREEDY, num_prompt_logprobs=1, num_logprobs=1, frequency_penalty=0.5)
    with gpu(monkeypatch):
        registry = KernelRegistry(ARCH)
        limits = shape(max_model_len=512, num_blocks=64, **kinds)
        driver = Driver(Waiting(CudaExecutor(limits, plan_weights(MODEL, decoder), registry)))
        loaded = set(registry._modules)
        ids = np.random.default_rng(0).integers(3, 512, 290).tolist()
        driver.add(0, ids, replace(state, token_ids=tuple(ids), prompt_len=290))
        for start in range(0, 290, 64):
            driver.step({0: min(64, 290 - start)}, prompt_logprobs=start == 0)
        driver.step({0: 1})
        assert set(registry._modules) == loaded == model_variants(limits)


def test_everything_that_a_model_may_launch_is_in_the_full_list() -> None:
    full: set[Variant] = all_variants()
    for kinds in ({}, {"kv_int8": True}, {"weight_int8": True}, {"dtype": "float16"}):
        assert model_variants(shape(**kinds)) <= full
    assert len(full) > 100


def test_the_cpu_device_refuses_what_it_has_not() -> None:
    config = EngineConfig(model=str(MODEL), dtype="float16")
    with pytest.raises(ConfigError, match=r"dtype: .* --device cuda"):
        memory_facts("cpu", config, open_checkpoint(MODEL))
