"""KV groups: the layers that share a window share block tables and free pages together."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers with the same attention window.

    Attributes:
        window: keys a query sees, itself included; None is all of them.
        layers: indices of the layers, ascending.
    """

    window: int | None
    layers: tuple[int, ...]


def kv_groups(layer_windows: Sequence[int | None]) -> tuple[KVGroup, ...]:
    """Group layers by window, in order of first appearance."""
    members: dict[int | None, list[int]] = {}
    for layer, window in enumerate(layer_windows):
        members.setdefault(window, []).append(layer)
    return tuple(KVGroup(window, tuple(layers)) for window, layers in members.items())
