"""What the router asks for, as the engine's own types; what the engine cannot do is refused by name.

The router sends token ids and makes the text itself, so text is made here only to look for stop strings.
In its sampling message 0 stands for "not given" in every field that is not optional. No I/O, no state.
"""

from collections.abc import Sequence

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from engine.errors import InvalidRequest
from engine.request.params import SamplingParams
from engine.request.structured import StructuredOutputs
from loader.generation import GenerationConfig
from rpc.sampling import set_fields, with_defaults

_NOT_SERVED = (
    *("mm_inputs", "extra_mm_inputs", "media_refs"),
    *("kv_transfer_params", "kv_transfer_params_json"),
)
_SHAPED_HERE = {"spaces_between_special_tokens", "grammar_from_first_token", "truncate_prompt_tokens", "seed"}
_DEFAULTED = ("temperature", "top_p", "repetition_penalty")
_CONSTRAINTS = {"json_schema": "json", "regex": "regex", "grammar": "grammar", "json_object": "json_object"}


def check_supported(request: pb.GenerateRequest) -> None:
    """Raises InvalidRequest that names the part of the request that is not served."""
    for name in _NOT_SERVED:
        value = getattr(request, name)
        if len(value) if isinstance(value, Sequence) else request.HasField(name):
            raise InvalidRequest(name, "is not served: the engine takes text and computes whole requests")
    if request.data_parallel_rank != 0:
        raise InvalidRequest("data_parallel_rank", f"{request.data_parallel_rank} is out of range, must be 0")


def sampling_params(message: pb.SamplingParams, defaults: GenerationConfig, max_model_len: int) -> SamplingParams:
    """Raises InvalidRequest naming the field. What the model's folder says holds where nothing is given."""
    constraint = message.WhichOneof("constraint")
    given = set_fields(message, without={constraint, *_SHAPED_HERE})
    if message.HasField("seed"):
        given["seed"] = message.seed & 0xFFFFFFFF  # a signed number on this wire
    if message.HasField("truncate_prompt_tokens"):
        whole = message.truncate_prompt_tokens == -1
        given["truncate_prompt_tokens"] = max_model_len - 1 if whole else message.truncate_prompt_tokens
    if constraint is not None:
        given["structured_outputs"] = _structured_outputs(message, constraint)
    shaped = {"detokenize": bool(message.stop), "skip_special_tokens": message.skip_special_tokens}
    return SamplingParams(**{"max_tokens": None, **with_defaults(given, defaults, _DEFAULTED), **shaped})


def _structured_outputs(message: pb.SamplingParams, constraint: str) -> StructuredOutputs | None:
    if constraint == "json_object" and not message.json_object:
        return None
    if constraint == "choice":
        return StructuredOutputs(choice=tuple(message.choice.choices))
    if constraint not in _CONSTRAINTS:
        raise InvalidRequest(constraint, f"is not served; use one of {', '.join(_CONSTRAINTS)} and choice")
    return StructuredOutputs(**{_CONSTRAINTS[constraint]: getattr(message, constraint)})
