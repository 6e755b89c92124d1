"""The door's queue: how many requests may wait, of all and of each tenant."""

import pytest

from engine.errors import OverCapacity
from engine.request.params import SamplingParams
from engine.schedule.sequence import Sequence
from engine.serving.inbox import Inbox
from engine.serving.live_request import LiveRequest
from engine.serving.stream import OutputChannel


def request(tenant: str) -> LiveRequest:
    sequence = Sequence("r", [1], SamplingParams(), max_output=1, seed=0, tenant=tenant)
    return LiveRequest([sequence], OutputChannel(), None)


async def test_each_tenant_has_a_queue_of_its_own() -> None:
    inbox = Inbox(10, max_queued_requests_per_tenant=2)
    for tenant in ("a", "a", "b"):
        inbox.submit(request(tenant))
    with pytest.raises(OverCapacity, match=r"2 requests of tenant 'a' .*max_queued_requests_per_tenant is 2") as caught:
        inbox.submit(request("a"))
    assert caught.value.num_queued == 2
    inbox.submit(request("b"))
    assert inbox.num_messages == 4  # what was refused is not there


async def test_requests_count_until_the_scheduler_has_a_row_for_them() -> None:
    inbox = Inbox(10, max_queued_requests_per_tenant=2)
    inbox.submit(request("a"))
    inbox.submit(request("a"))
    assert len(list(inbox.drain())) == 2
    inbox.waiting = {"a": 1, "b": 2}  # what the loop says after scheduling
    inbox.submit(request("a"))
    for tenant in ("a", "b"):
        with pytest.raises(OverCapacity):
            inbox.submit(request(tenant))


async def test_the_common_bound_holds_for_all_together() -> None:
    inbox = Inbox(3, max_queued_requests_per_tenant=2)
    inbox.waiting = {"a": 1, "b": 1}
    inbox.submit(request("c"))
    with pytest.raises(OverCapacity, match=r"^3 requests are waiting, the limit is 3$") as caught:
        inbox.submit(request("d"))
    assert caught.value.num_queued == 3


async def test_without_a_bound_a_tenant_may_fill_the_queue() -> None:
    inbox = Inbox(3)
    for _ in range(3):
        inbox.submit(request("a"))
    with pytest.raises(OverCapacity):
        inbox.submit(request("a"))
