"""Golden models on the card: the whole executor against outputs of another implementation, computed in float32."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.devices.cuda.executor import CudaExecutor
from engine.devices.cuda.registry import KernelRegistry
from engine.devices.cuda.shape import CudaShape
from engine.plan import NO_TARGET, PLACEHOLDER, BlockUpdate, RowState, SampleBatch, StepPlan
from loader.checkpoint import open_checkpoint
from loader.weights import plan_weights

GOLDEN = Path(__file__).parents[2] / "tests" / "golden"
NAMES = tuple(sorted(path.parent.name for path in GOLDEN.glob("*/model.safetensors")))

BOUND = 0.2
"""Largest difference of a logit, as a share of the deviation; the cpu device's bfloat16 reaches 0.08 on `llama`."""

_OUTPUTS = 8


def check_golden(registry: KernelRegistry, name: str, prompts: int) -> Iterator[tuple[str, float]]:
    """A case's name and its error as a share of what is allowed; an id that differs without a near tie is 2."""
    checkpoint = open_checkpoint(GOLDEN / name)
    golden = np.load(GOLDEN / name / "golden.npz")
    shape = CudaShape(
        decoder=checkpoint.decoder, dtype="bfloat16", kv_int8=False, weight_int8=False, num_blocks=64, block_size=16,
        max_model_len=512, max_num_seqs=8, max_num_batched_tokens=512,
    )  # fmt: skip
    executor = CudaExecutor(shape, plan_weights(checkpoint.path, checkpoint.decoder), registry)
    for k in range(prompts):
        prompt, expected = golden[f"prompt_{k}"], golden[f"logits_{k}"]
        logits, ids = _generate(executor, prompt)
        bound = BOUND * expected.std()
        yield f"{name} prompt {k} logits", float(np.abs(logits[: len(prompt)] - expected).max() / bound)
        yield (
            f"{name} prompt {k} ids",
            _ids_error(ids, golden[f"greedy_{k}"].tolist(), logits[len(prompt) - 1 :], bound),
        )


def _ids_error(ids: list[int], expected: list[int], logits: NDArray[np.float32], bound: float) -> float:
    for got, want, row in zip(ids, expected, logits, strict=False):
        if got != want:
            return float(row[got] - row[want]) / (2 * bound)
    return 0.0


def _generate(executor: CudaExecutor, prompt: NDArray[np.int32]) -> tuple[NDArray[np.float32], list[int]]:
    """Logits after every token, and greedy ids."""
    seen: dict[int, NDArray[np.float32]] = {}
    position, ids = 0, []

    def keep(tokens: NDArray[np.int32], logits: NDArray[np.float32]) -> None:
        seen.update({position + int(token): row.copy() for token, row in zip(tokens, logits, strict=True)})

    executor.on_logits = keep
    for step in range(_OUTPUTS):
        count = 1 if step else len(prompt)
        launched = _launch(executor, step, position, prompt if step == 0 else None)
        launched.wait()
        launched.release()
        ids.append(int(launched.result().token_ids[0]))
        position += count
    return np.stack([seen[i] for i in range(position)]), ids


def _launch(executor: CudaExecutor, step: int, position: int, prompt: NDArray[np.int32] | None) -> Any:
    tokens = np.array([PLACEHOLDER], np.int32) if prompt is None else prompt.astype(np.int32)
    targets = None if prompt is None else np.append(tokens[1:], NO_TARGET).astype(np.int32)
    blocks = (BlockUpdate(0, 2, 0, tuple(range(63, 31, -1))),) if prompt is not None else ()
    states = (_GREEDY,) if prompt is not None else ()
    start, count = np.array([position], np.int32), np.array([len(tokens)], np.int32)
    row, first = np.array([2], np.int32), np.array([0], np.int32)
    executor.forward(StepPlan(step, row, start, count, tokens, targets, states, blocks, ()))
    return executor.sample(SampleBatch(step, first, row))


_GREEDY = RowState(
    row=2, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, choice=0, banned_ids=(), min_position=0,
    num_logprobs=-1, num_prompt_logprobs=0,
)  # fmt: skip
