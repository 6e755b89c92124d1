"""The record in which a row's sampling parameters travel to `engine/devices/cpu/sampling/sampler.py`."""

import numpy as np

PARAMS = np.dtype(
    [
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("top_k", np.int64),
        ("seed", np.uint64),
        ("choice", np.int64),
        ("position", np.int64),
        ("presence_penalty", np.float64),
        ("frequency_penalty", np.float64),
        ("repetition_penalty", np.float64),
    ],
    align=True,
)
"""`position` is the sequence position of the token being sampled; the rest is as in `RowState`."""
