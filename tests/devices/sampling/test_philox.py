"""Known-answer vectors of Random123 1.14 (tests/kat_vectors, philox4x32 with 10 rounds)."""

import numpy as np
import pytest
from numba import njit

from engine.devices.cpu.sampling.philox import philox4x32
from tests.devices.sampling.reference import philox_words

VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@njit
def run(c0, c1, c2, c3, k0, k1):  # type: ignore[no-untyped-def]
    return philox4x32(c0, c1, c2, c3, k0, k1)


@pytest.mark.parametrize("counter, key, expected", VECTORS)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert run(*map(np.uint32, counter + key)) == expected
    assert philox_words(counter, key) == list(expected)  # type: ignore[arg-type]
