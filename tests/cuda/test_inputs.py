"""A step's plan as the forward pass reads it, and differences to state arrays."""

import numpy as np
import pytest

from engine.devices.cuda.ops import sampling
from engine.plan import PLACEHOLDER
from tests.cuda.kernels import CpuRegistry
from tests.gpu_without_gpu.executor import poisoned

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("padded", [11, 16, 300])
def test_inputs_of_a_step(padded: int) -> None:
    """Three entries of 4, 1 and 6 tokens; placeholders take the last id of their row, which is not their entry."""
    registry = CpuRegistry()
    plan_ids = np.array([3, 4, 5, 6, PLACEHOLDER, 10, 11, 12, 13, 14, PLACEHOLDER], np.int32)
    starts, entry_rows = np.array([0, 30, 7], np.int32), np.array([2, 0, 3], np.int32)
    query_start_loc = np.array([0, 4, 5, 11], np.int32)
    last_ids = np.array([100, 101, 102, 103], np.int32)
    ids, token_rows, positions = (poisoned(padded, np.int32) for _ in range(3))
    seq_lens = poisoned(3, np.int32)
    sampling.prepare_inputs(
        registry,
        plan_ids=plan_ids,
        starts=starts,
        query_start_loc=query_start_loc,
        entry_rows=entry_rows,
        last_ids=last_ids,
        ids=ids,
        token_rows=token_rows,
        positions=positions,
        seq_lens=seq_lens,
        entries=3,
        padded=padded,
        stream=None,
    )
    assert ids[:11].tolist() == [3, 4, 5, 6, 100, 10, 11, 12, 13, 14, 103]
    assert token_rows[:11].tolist() == [2] * 4 + [0] + [3] * 6
    assert positions[:11].tolist() == [0, 1, 2, 3, 30, 7, 8, 9, 10, 11, 12]
    assert seq_lens.tolist() == [4, 31, 13]
    assert not ids[11:].any() and not positions[11:].any() and (token_rows[11:] == -1).all()


def test_scatter() -> None:
    target, values = np.arange(20, dtype=np.int32).reshape(10, 2), np.array([[-1, -2], [-3, -4]], np.int32)
    sampling.scatter(CpuRegistry(), target, np.array([7, 0], np.int32), values, 2, 2, stream=None)
    expected = np.arange(20).reshape(10, 2)
    expected[[7, 0]] = values
    np.testing.assert_array_equal(target, expected)
