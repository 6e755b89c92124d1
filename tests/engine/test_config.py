"""EngineConfig and ServerOptions refuse what cannot work, by field."""

import math
from typing import Any

import pytest

from engine.config import EngineConfig, config_from_mapping
from engine.errors import ConfigError
from rpc.options import ServerOptions


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs: 0 is out of range, must be between 1 and 4096"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens: 0 is out of range"),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 9}, "8 is less than max_num_seqs 9"),
        ({"device": "tpu"}, "device: 'tpu' is not one of auto, cuda, cpu"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "kv_cache_dtype: 'fp8_e4m3' is not one of auto, int8"),
        ({"block_size": 0}, "block_size: 0 is out of range"),
        ({"blok_size": 1, "x": 2}, "unknown setting: blok_size, x"),
        ({"max_num_seqs": "x"}, "max_num_seqs: 'x' is not an integer"),
        ({"seed": True}, "seed: True is not an integer"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching: 1 is not true or false"),
        ({"gpu_memory_utilization": "a"}, "gpu_memory_utilization: 'a' is not a number"),
        ({"gpu_memory_utilization": math.nan}, "gpu_memory_utilization: nan is not a number"),
        ({"served_model_name": 5}, "served_model_name: 5 is not a string, nor none"),
        ({"block_size": None}, "block_size: None is not an integer"),
    ],
)
def test_a_bad_setting_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    """K19"""
    with pytest.raises(ConfigError, match=message):
        config_from_mapping({"model": "m", **settings})


def test_defaults_are_consistent() -> None:
    assert EngineConfig(model="m").max_num_seqs == 64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"port": 65536}, "port: 65536 is out of range, must be between 0 and 65535"),
        ({"grace": math.inf}, "grace: inf is not a number"),
        ({"tool_call_parser": "xml"}, "tool_call_parser: 'xml' is not one of auto, hermes, llama3_json"),
    ],
)
def test_a_bad_option_of_the_server_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerOptions(**options)
