"""The step a worker runs before it is ready leaves no trace."""

import numpy as np
import pytest

from tests.devices.driver import GREEDY, TINY, Driver, LoudWeights, open_executor

PROMPT = np.random.default_rng(7).integers(0, TINY.vocab_size, 20)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nobody_sees_what_it_computed(dtype: str) -> None:
    outcomes = []
    for warms_up in (False, True):
        with open_executor(TINY, LoudWeights(TINY), dtype=dtype) as executor:
            if warms_up:
                executor.warm_up()
            driver = Driver(executor)
            driver.add(0, PROMPT, GREEDY)
            sequence = driver.run(0, 8, 6)
            outcomes.append((np.stack([sequence.logits[i] for i in sorted(sequence.logits)]), sequence.sampled))
    assert np.array_equal(outcomes[0][0], outcomes[1][0]) and outcomes[0][1] == outcomes[1][1]
