"""The token budget that is chosen where none is given."""

from dataclasses import replace
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.devices import choose_token_budget
from engine.devices.cpu import numkong
from engine.devices.cpu.budget import token_budget
from tests.devices.driver import TINY

SMALL = replace(
    TINY, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
    head_dim=64,
)  # fmt: skip
"""106,168,320 weights in products, as SmolLM2-135M has."""

LARGE = replace(
    TINY, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, head_dim=128,
)  # fmt: skip


@pytest.mark.parametrize(
    ("decoder", "settings", "tokens"),
    [
        (SMALL, {"quantization": "int8", "cpu_threads": 2}, 512),  # 0.25 s * 2 * 400e9 / (2 * 106e6) = 941
        (SMALL, {"dtype": "bfloat16", "cpu_threads": 2}, 512),  # 518
        (SMALL, {"dtype": "bfloat16", "cpu_threads": 4}, 1024),
        (SMALL, {"dtype": "float32", "cpu_threads": 4}, 128),  # 202
        (SMALL, {"quantization": "int8", "cpu_threads": 32}, 2048),
        (LARGE, {"quantization": "int8", "cpu_threads": 2}, 128),
        (LARGE, {"quantization": "int8", "cpu_threads": 32}, 128),  # 229
        (LARGE, {"quantization": "int8", "cpu_threads": 64}, 256),
    ],
)
def test_a_quarter_of_a_second(
    monkeypatch: pytest.MonkeyPatch, decoder: Any, settings: dict[str, Any], tokens: int
) -> None:
    monkeypatch.setattr(numkong, "has_bfloat16_dot", lambda: True)
    assert token_budget(EngineConfig(model="m", **settings), decoder) == tokens


def test_what_is_given_stays_and_every_row_can_decode() -> None:
    class Checkpoint:
        decoder = LARGE

    def chosen(**settings: Any) -> int:
        config = EngineConfig(model="m", quantization="int8", cpu_threads=2, **settings)
        return choose_token_budget("cpu", config, Checkpoint()).token_budget  # type: ignore[arg-type]

    assert chosen(max_num_batched_tokens=100) == 100
    assert chosen(max_num_seqs=300) == 300
