"""Placement of values, panels and messages: arithmetic that everything else trusts."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.devices.cpu.layout import PANEL, panel_widths
from engine.devices.cpu.messages import Decoder, encode
from engine.devices.cpu.model import ModelShape, record
from tests.devices.driver import TINY


@pytest.mark.parametrize("layers", [1, 5])
def test_values_that_live_at_once_never_overlap(layers: int) -> None:
    decoder = replace(TINY, num_hidden_layers=layers, layer_windows=(None,) * layers)
    shape = ModelShape(
        decoder=decoder,
        dtype="bfloat16",
        num_blocks=4,
        block_size=16,
        max_model_len=64,
        max_num_seqs=2,
        max_num_batched_tokens=40,
        threads=2,
    )
    recording = record(shape)
    ops, offsets = recording.recorder.ops, recording.offsets
    hidden = ops[recording.body - 1].writes
    owner: dict[int, int] = {}  # byte -> value that wrote it last
    for op in ops:
        for value in op.reads:
            assert {owner[offsets[value.number] + i] for i in range(_nbytes(value))} == {value.number}
        for i in range(_nbytes(op.writes)):
            owner[offsets[op.writes.number] + i] = op.writes.number
    for kept in (hidden, recording.logits):
        assert {owner[offsets[kept.number] + i] for i in range(_nbytes(kept))} == {kept.number}
    assert max(owner) < recording.workspace
    # memory is reused: more layers take no more of it
    assert recording.workspace == record(replace(shape, decoder=replace(decoder, num_hidden_layers=1))).workspace


def _nbytes(value) -> int:  # type: ignore[no-untyped-def]
    return value.rows * -(-value.width // 16) * 16 * (2 if value.compute else 4)


@given(n=st.integers(1, 5000), threads=st.integers(1, 9), unit=st.sampled_from([16, 48]))
def test_panels_cover_all_columns_in_whole_units(n: int, threads: int, unit: int) -> None:
    widths = panel_widths(n, threads, unit)
    assert sum(widths) == n
    assert all(width == widths[0] and width % unit == 0 for width in widths[:-1])
    assert min(widths) > 0 and max(widths) < PANEL + unit


@given(messages=st.lists(st.binary(max_size=60)), cuts=st.lists(st.integers(1, 40)))
def test_messages_survive_any_cut(messages: list[bytes], cuts: list[int]) -> None:
    stream, decoder = b"".join(map(encode, messages)), Decoder()
    got: list[Any] = []
    for cut in [*cuts, len(stream)]:
        got += decoder.feed(stream[:cut])
        stream = stream[cut:]
    assert got == messages
