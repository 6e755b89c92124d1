"""Philox4x32-10, a counter-based generator (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011).

The random stream of a row is a function, not a state: the word for a token depends on the row's seed, the position
of the token being sampled, the choice and the token's id, so neither batch nor history can change it.

    key     = (seed low 32 bits, seed high 32 bits)
    counter = (token id // 4, position, choice, 0);  word token id % 4 of the result
    position: index in its sequence of the token being sampled (the first generated one has the prompt's length)
"""

# mypy: disable-error-code="no-untyped-def,misc"

import numpy as np

from engine.devices.cpu.kernels.jit import inner

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)
_32 = np.uint64(32)


@inner
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Ten rounds over counter (c0, c1, c2, c3) and key (k0, k1): four uint32 words from six."""
    for _ in range(10):
        p0, p1 = _M0 * np.uint64(c0), _M1 * np.uint64(c2)
        c0 = np.uint32(np.uint32(p1 >> _32) ^ c1 ^ k0)
        c2 = np.uint32(np.uint32(p0 >> _32) ^ c3 ^ k1)
        c1, c3 = np.uint32(p1), np.uint32(p0)
        k0, k1 = np.uint32(k0 + _W0), np.uint32(k1 + _W1)
    return c0, c1, c2, c3
