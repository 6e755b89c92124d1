"""EngineConfig: every setting of the engine, with its default, its help text and its validation.

The command line derives its flags from these fields (`max_num_seqs` is `--max-num-seqs`),
so a setting exists in one place. Names and meanings follow vLLM where the thing exists there.
"""

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal, get_args

from engine.errors import ConfigError

DeviceKind = Literal["auto", "cuda", "cpu"]
DType = Literal["auto", "bfloat16", "float16", "float32"]
LoadFormat = Literal["auto", "dummy"]
KVCacheDType = Literal["auto", "int8"]
Quantization = Literal["auto", "int8"]


def _setting(default: Any, help: str, **bounds: float) -> Any:
    """A config field; `bounds` may hold `min` and `max`, both inclusive."""
    return field(default=default, metadata={"help": help, **bounds})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. Raises ConfigError from its constructor, naming the field."""

    model: str = field(metadata={"help": "Folder of a Hugging Face style checkpoint."})
    served_model_name: str | None = _setting(None, "Name clients see; the folder's name if unset.")
    device: DeviceKind = _setting("auto", "Where the model runs; auto picks cuda when it is there, else cpu.")
    dtype: DType = _setting("auto", "Compute dtype; auto is bfloat16. float16 is for cuda, float32 for cpu.")
    load_format: LoadFormat = _setting("auto", "dummy makes random weights from config.json alone.")
    max_model_len: int | None = _setting(
        None, "Longest sequence, prompt and output; the model's own limit if unset.", min=1
    )
    max_num_seqs: int = _setting(64, "Rows that run at once.", min=1, max=4096)
    max_num_batched_tokens: int | None = _setting(
        None,
        "Token budget of one step; if unset, what the cpu computes in 0.25 s, 512 on cuda.",
        min=1,
        max=1 << 20,
    )
    max_queued_requests: int = _setting(1024, "Requests that may wait; more are refused.", min=1)
    max_queued_requests_per_tenant: int | None = _setting(
        None, "The same for each tenant by itself; no bound but the common one if unset.", min=1
    )
    stream_interval: int = _setting(
        1, "Tokens of a choice per message of its stream; the first comes at once and the end is never kept.", min=1
    )
    block_size: int = _setting(16, "Tokens in a KV block.", min=1, max=256)
    kv_cache_memory_bytes: int | None = _setting(None, "Memory for KV blocks; a share of what is free if unset.", min=1)
    gpu_memory_utilization: float = _setting(
        0.9, "Share of the GPU's memory that the engine may use, all other processes counted.", min=0.05, max=1.0
    )
    kv_cache_dtype: KVCacheDType = _setting(
        "auto", "How keys and values are stored; auto is the compute dtype, int8 has a scale per token and head."
    )
    quantization: Quantization = _setting(
        "auto", "auto leaves the weights as they are; int8 rounds them while loading (cpu: activations too, in groups)."
    )
    batch_invariant: bool = _setting(
        False, "Same tokens whatever else is in the batch, without cuBLAS; the cpu device always does this."
    )
    enable_prefix_caching: bool = _setting(True, "Reuse KV blocks of equal prefixes.")
    enable_chunked_prefill: bool = _setting(True, "Split long prompts over steps.")
    long_prefill_token_threshold: int = _setting(
        0, "Most tokens of one prompt in a step, so that a long one leaves room for others; 0 is no limit.", min=0
    )
    max_logprobs: int = _setting(20, "Most alternatives a request may ask for per token.", min=0)
    seed: int = _setting(0, "Seed from which unseeded requests draw theirs.", min=0, max=(1 << 63) - 1)
    cpu_threads: int | None = _setting(
        None, "Threads of the cpu device; the processors this process may use if unset.", min=1, max=1024
    )
    otlp_traces_endpoint: str | None = _setting(
        None, "URL of the collector that gets a span per request, OTLP over gRPC; needs the extra otel. Off if unset."
    )

    def __post_init__(self) -> None:
        for f in fields(self):
            _check_field(f, getattr(self, f.name))
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens: {self.max_num_batched_tokens} is less than max_num_seqs "
                f"{self.max_num_seqs}, so that not every row could decode in a step"
            )
        if self.long_prefill_token_threshold and not self.enable_chunked_prefill:
            raise ConfigError(
                f"long_prefill_token_threshold: {self.long_prefill_token_threshold} needs enable_chunked_prefill"
            )

    @property
    def token_budget(self) -> int:
        """`max_num_batched_tokens`, where it is set."""
        assert self.max_num_batched_tokens is not None
        return self.max_num_batched_tokens


_KINDS = {bool: "true or false", int: "an integer", float: "a number"}


def _check_field(f: Field[Any], value: object) -> None:
    if value is None:
        return
    kind = next((k for k in (bool, int, float) if k in (f.type, *get_args(f.type))), None)
    fits = isinstance(value, (int, float) if kind is float else kind or object)
    if kind is not None and (not fits or (isinstance(value, bool) and kind is not bool)):
        raise ConfigError(f"{f.name}: {value!r} is not {_KINDS[kind]}")
    low, high = f.metadata.get("min"), f.metadata.get("max")
    bounded = isinstance(value, int | float) and not isinstance(value, bool)
    if bounded and ((low is not None and value < low) or (high is not None and value > high)):
        limits = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ConfigError(f"{f.name}: {value} is out of range, must be {limits}")
    choices = get_args(f.type)
    if choices and all(isinstance(c, str) for c in choices) and value not in choices:
        raise ConfigError(f"{f.name}: {value!r} is not one of {', '.join(choices)}")


def config_from_mapping(settings: Mapping[str, Any]) -> EngineConfig:
    """Build a config from loose settings. Raises ConfigError on a name that does not exist."""
    known = {f.name for f in fields(EngineConfig)}
    unknown = sorted(set(settings) - known)
    if unknown:
        raise ConfigError(f"unknown setting: {', '.join(unknown)}")
    return EngineConfig(**settings)
