"""Pace: how fast requests have been ending lately, from which a refused client learns when to try again."""

from collections import deque

from rpc.clock import Clock

WINDOW_SECONDS = 60.0
MAX_SAMPLES = 256
UNKNOWN_SECONDS = 1.0
MIN_SECONDS, MAX_SECONDS = 0.1, 30.0


class Pace:
    """Keeps the times at which the latest requests ended, for whatever reason."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ended: deque[float] = deque(maxlen=MAX_SAMPLES)

    def request_ended(self) -> None:
        """A request has left the engine."""
        self._ended.append(self._clock.now())

    def retry_after(self, num_queued: int) -> float:
        """Seconds in which what is queued now would end at the rate of the last minute.

        UNKNOWN_SECONDS when fewer than two ended; never outside MIN_SECONDS .. MAX_SECONDS.
        """
        now = self._clock.now()
        while self._ended and self._ended[0] < now - WINDOW_SECONDS:
            self._ended.popleft()
        if len(self._ended) < 2:
            return UNKNOWN_SECONDS
        seconds_each = (now - self._ended[0]) / len(self._ended)
        return min(max(num_queued * seconds_each, MIN_SECONDS), MAX_SECONDS)
