"""RequestRegistry: the requests that are alive, from their admission to their last delta.

Whatever ends a request (its last token, an abort, a fault) takes its sequences out of the roster and is told to
`on_end` once. A fault while its text is made ends that request; others go on. Read next:
`engine/serving/live_request.py`, `engine/loop.py` (who calls it).
"""

import asyncio
import logging
from collections.abc import Callable

from engine.errors import EngineError, RequestFault
from engine.plan import StepResult
from engine.schedule.roster import Roster
from engine.schedule.settle import Settled, Settlement
from engine.serving.live_request import LiveRequest

logger = logging.getLogger(__name__)


class RequestRegistry:
    """Belongs to the loop's task.

    Attributes:
        live: requests by id.
        is_empty: set while there is none.
    """

    def __init__(self, roster: Roster, on_end: Callable[[LiveRequest], None]) -> None:
        self.live: dict[str, LiveRequest] = {}
        self.is_empty = asyncio.Event()
        self.is_empty.set()
        self._roster = roster
        self._on_end = on_end

    def add(self, request: LiveRequest) -> None:
        """Queue a new request."""
        self.live[request.request_id] = request
        self.is_empty.clear()
        self._roster.add(request.sequences[0])

    def publish(self, settlement: Settlement, result: StepResult) -> None:
        """Push what settled; requests whose last choice has ended are forgotten."""
        sequences, token_ids, samples, others = settlement
        for sequence, token_id, sample in zip(sequences, token_ids, samples, strict=True):
            if sequence.push_plain is None:
                self._publish(Settled(sequence, token_id, sample, range(0), False, None), result)
                continue
            try:
                sequence.push_plain(token_id)
            except Exception as error:
                self._fail_text(sequence.request_id, error)
        for settled in others:
            self._publish(settled, result)

    def abort(self, request_id: str) -> None:
        """End a request with finish reason "abort", if it is there."""
        request = self.live.get(request_id)
        if request is not None:
            request.abort()
            self._forget(request)

    def fail(self, request_id: str, error: EngineError) -> None:
        """End a request with an error."""
        request = self.live[request_id]
        request.channel.fail(error)
        self._forget(request)

    def fail_all(self, error: EngineError) -> None:
        """End every request with an error."""
        for request_id in list(self.live):
            self.fail(request_id, error)

    def _publish(self, settled: Settled, result: StepResult) -> None:
        request = self.live.get(settled.sequence.request_id)
        if request is None:
            return
        if fault := _fault(settled):
            return self.fail(request.request_id, fault)
        try:
            request.publish(settled, result, self._roster)
        except Exception as error:
            return self._fail_text(request.request_id, error)
        if request.ended:
            self._forget(request)

    def _fail_text(self, request_id: str, error: Exception) -> None:
        if request_id in self.live:
            logger.error("request %s failed while its text was made", request_id, exc_info=error)
            self.fail(request_id, RequestFault(f"making text failed: {error!r}"))

    def _forget(self, request: LiveRequest) -> None:
        for sequence in request.sequences:
            self._roster.finish(sequence)
        del self.live[request.request_id]
        self._on_end(request)
        if not self.live:
            self.is_empty.set()


def _fault(settled: Settled) -> EngineError | None:
    """Why the sequence's request cannot go on, None when it can."""
    grammar = settled.sequence.grammar
    if grammar is not None and grammar.error is not None:
        return grammar.error
    if settled.faulted:
        return RequestFault("no token to sample: the model's logits are not finite, or the request's rules leave none")
    return None
