"""What is freed while steps are in flight waits for the last of them."""

import pytest

from engine.kv.fence import Fence, Fenced


def things(n: int) -> Fenced:
    return Fenced(((n,),), (n,))


def test_it_waits_for_the_last_step_launched_before() -> None:
    released: list[Fenced] = []
    fence = Fence(released.append)
    fence.free(things(0))
    assert (released, len(fence), fence.has_steps_in_flight) == ([things(0)], 0, False)
    assert [fence.launch(), fence.launch()] == [1, 2]
    fence.free(things(1))
    fence.free(things(2))
    assert fence.launch() == 3
    fence.free(things(3))
    assert (list(fence), len(fence)) == ([things(1), things(2), things(3)], 3)
    fence.settle(1)
    assert (len(released), fence.has_steps_in_flight) == (1, True)
    fence.settle(2)
    assert released == [things(0), things(1), things(2)]
    fence.settle(3)
    assert (released[3:], len(fence), fence.has_steps_in_flight) == ([things(3)], 0, False)


@pytest.mark.parametrize("step", [0, 1, 3, 4])
def test_steps_settle_in_their_order(step: int) -> None:
    fence = Fence(lambda _: None)
    for _ in range(3):
        fence.launch()
    fence.settle(1)
    with pytest.raises(ValueError, match=f"step {step} settles after step 1 of 3 launched"):
        fence.settle(step)


def test_a_step_that_was_not_launched_cannot_settle() -> None:
    fence = Fence(lambda _: None)
    with pytest.raises(ValueError, match="step 1 settles after step 0 of 0 launched"):
        fence.settle(1)
