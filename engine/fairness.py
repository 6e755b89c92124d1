"""Fairness: the order among tenants, by a virtual token counter, and who is above its share.

Each tenant has a counter of the tokens it was served; the lowest goes first. A tenant that comes back
is lifted to the lowest counter among those present, so that idling saves nothing up. Source: the
Virtual Token Counter of Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024.
"""

from collections import defaultdict

OUTPUT_WEIGHT = 2.0
"""An output token costs this many prompt tokens, as in the paper."""


class Fairness:
    """Counters and presence of tenants. Tenants come from credentials, so their number is bounded."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._present: defaultdict[str, int] = defaultdict(int)

    @property
    def num_present(self) -> int:
        """Tenants with a request."""
        return len(self._present)

    def arrive(self, tenant: str) -> None:
        """A request of `tenant` came."""
        if tenant not in self._present:
            floor = min((self._served[t] for t in self._present), default=0.0)
            self._served[tenant] = max(self._served.get(tenant, 0.0), floor)
        self._present[tenant] += 1

    def leave(self, tenant: str) -> None:
        """A request of `tenant` ended."""
        self._present[tenant] -= 1
        if not self._present[tenant]:
            del self._present[tenant]

    def charge(self, tenant: str, prompt_tokens: int, output_tokens: int) -> None:
        """`tenant` was served these tokens."""
        self._served[tenant] += prompt_tokens + OUTPUT_WEIGHT * output_tokens

    def served(self, tenant: str) -> float:
        """The counter; lower goes first."""
        return self._served[tenant]
