"""CudaExecutor: launches steps from the calling thread; nothing it does waits for the GPU. Tests drive it directly.

    forward(plan)   differences, copies and inputs uploaded; the body launched over the plan's tokens
    sample(batch)   per tile of rows: head, sampler, log-probabilities; results sent to the host

A plan that is wrong raises ValueError before anything is launched, and later plans work.
Read next: `engine/devices/cuda/model.py`, `engine/devices/cuda/slots.py`, `engine/devices/cuda/device.py`.
"""

from collections import deque
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.devices.cuda.launched import Launched, Table
from engine.devices.cuda.model import CudaModel
from engine.devices.cuda.ops import sampling
from engine.devices.cuda.parameters import load_parameters
from engine.devices.cuda.registry import KernelRegistry
from engine.devices.cuda.rows import Rows
from engine.devices.cuda.shape import CudaShape
from engine.devices.cuda.slots import SLOTS, Slot
from engine.devices.cuda.variants import model_variants
from engine.devices.cuda.weights import Weights
from engine.plan import NO_TARGET, PLACEHOLDER, BlockCopy, Float32Array, Int32Array, SampleBatch, StepPlan
from loader.weights import WeightSource

LogitsHook = Callable[[Int32Array, Float32Array], None]


class CudaExecutor:
    """One model on one GPU.

    Attributes:
        on_logits: called per tile with the plan's token indices and their logits [rows, vocab], for tests; waits for
            the GPU.
    """

    def __init__(
        self,
        shape: CudaShape,
        source: WeightSource,
        registry: KernelRegistry,
        advance: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        """Load the kernels, then the weights. Raises ConfigError, DeviceFault or an error of CuPy's."""
        import cupy

        self.shape = shape
        self.on_logits: LogitsHook | None = None
        self._registry = registry
        registry.load(model_variants(shape))
        self._compute, self._uploads, self._downloads = (cupy.cuda.Stream(non_blocking=True) for _ in range(3))
        self._rows = Rows(shape)
        parameters = load_parameters(Weights(source, shape, self._compute, advance), shape.decoder)
        self.model = CudaModel(shape, parameters, self._rows.block_tables, registry, self._compute)
        words = 16 * shape.max_num_seqs + 4 * shape.max_num_batched_tokens + 1024
        self._free = deque(Slot(words, words) for _ in range(SLOTS))
        self._launched: tuple[StepPlan, Slot] | None = None

    def forward(self, plan: StepPlan) -> None:
        """Launch everything up to the hidden states of the plan's tokens."""
        self._launched = None
        self._check(plan)
        slot = self._free.popleft()
        slot.begin(self._compute)
        staged = self._rows.stage(plan.row_states, plan.block_updates, slot, self._compute)
        copies = [(group, slot.put(pairs), len(pairs)) for group, pairs in _copies(plan.block_copies)]
        query_start_loc = np.concatenate([np.zeros(1, np.int32), np.cumsum(plan.num_tokens, dtype=np.int32)])
        inputs = [slot.put(values) for values in (plan.token_ids, query_start_loc, plan.starts, plan.rows)]
        slot.upload(self._uploads, self._compute)
        self._rows.apply(self._registry, staged, slot, self._compute)
        for group, first, count in copies:
            self.model.copy_blocks(group, slot.packed[first : first + 2 * count], count)
        self._launch_body(plan, *(slot.packed[first:] for first in inputs))
        self._launched = plan, slot

    def _launch_body(self, plan: StepPlan, ids: Any, query_start_loc: Any, starts: Any, rows: Any) -> None:
        buffers = self.model.buffers
        sampling.prepare_inputs(
            self._registry,
            plan_ids=ids,
            starts=starts,
            query_start_loc=query_start_loc,
            entry_rows=rows,
            last_ids=self._rows.last_ids,
            ids=buffers.ids,
            token_rows=buffers.token_rows,
            positions=buffers.positions,
            seq_lens=buffers.seq_lens,
            entries=len(plan.rows),
            padded=len(plan.token_ids),
            stream=self._compute,
        )
        self.model.body(plan.num_tokens, plan.starts + plan.num_tokens, query_start_loc, rows)

    def sample(self, batch: SampleBatch) -> Launched:
        """Launch sampling for the plan of the last `forward`, and every log-probability that it asks for."""
        if self._launched is None or self._launched[0].step != batch.step:
            raise ValueError(f"step {batch.step}: sample without its forward")
        (plan, slot), self._launched = self._launched, None
        vocab = self.shape.decoder.vocab_size
        targets = np.full(len(plan.token_ids), NO_TARGET) if plan.prompt_targets is None else plan.prompt_targets
        prompt = np.flatnonzero(targets != NO_TARGET)
        prompt_counts = np.repeat(self._rows.num_prompt_logprobs[plan.rows], plan.num_tokens)[prompt]
        count = len(batch.entries)
        launched = Launched(
            plan.step,
            slot,
            slot.room(count),
            slot.room(count),
            Table.take(slot, self._rows.num_logprobs[batch.rows], vocab),
            Table.take(slot, prompt_counts, vocab),
            self._free.append,
        )
        self._launch_samples(plan, batch, launched)
        self._launch_prompt(prompt, targets[prompt], launched)
        slot.download(self._downloads, self._compute)
        return launched

    def _launch_samples(self, plan: StepPlan, batch: SampleBatch, launched: Launched) -> None:
        slot = launched.slot
        lasts = (np.cumsum(plan.num_tokens) - 1)[batch.entries]
        positions = (plan.starts + plan.num_tokens)[batch.entries]
        firsts = [slot.put(values) for values in (lasts, batch.rows, positions)]
        mask_first = None if batch.masks is None else slot.put(batch.masks)
        slot.upload(self._uploads, self._compute)
        indices, rows, places = (slot.packed[first : first + len(lasts)] for first in firsts)
        token_ids, faulted = slot.results(launched.token_ids), slot.results(launched.faulted)
        for tile in self._tiles(len(lasts)):
            logits = self._logits(indices[tile], lasts[tile])
            sampling.sample(
                self._registry,
                self._rows.state,
                logits=logits,
                logit_rows=self.model.buffers.identity,
                rows=rows[tile],
                positions=places[tile],
                masks=None if batch.masks is None else _words(slot.packed[mask_first:], tile, batch.masks.shape[1]),
                changed=self.model.buffers.changed,
                token_ids=token_ids[tile],
                faulted=faulted[tile],
                samples=tile.stop - tile.start,
                stream=self._compute,
            )
            self._launch_logprobs(launched.logprobs, tile, logits, token_ids[tile])

    def _launch_prompt(self, indices: NDArray[np.int64], targets: Int32Array, launched: Launched) -> None:
        slot = launched.slot
        firsts = slot.put(indices), slot.put(targets)
        slot.upload(self._uploads, self._compute)
        places, tokens = (slot.packed[first : first + len(indices)] for first in firsts)
        for tile in self._tiles(len(indices)):
            logits = self._logits(places[tile], indices[tile])
            self._launch_logprobs(launched.prompt_logprobs, tile, logits, tokens[tile])

    def _launch_logprobs(self, table: Table | None, tile: slice, logits: Any, tokens: Any) -> None:
        if table is not None:
            sampling.logprobs(
                self._registry,
                logits=logits,
                logit_rows=self.model.buffers.identity,
                tokens=tokens,
                out=table.rows(tile),
                requests=tile.stop - tile.start,
                k=table.width,
                vocab=self.shape.decoder.vocab_size,
                stream=self._compute,
            )

    def _logits(self, indices: Any, tokens: NDArray[Any]) -> Any:
        """Logits after the plan's tokens at these indices: [head_rows, vocab] on the GPU, valid until the next."""
        logits = self.model.head(indices, len(tokens))
        if self.on_logits is not None:
            self.on_logits(tokens.astype(np.int32), logits.get(stream=self._compute)[: len(tokens)])
        return logits

    def _tiles(self, count: int) -> Iterator[slice]:
        step = self.shape.head_rows
        return (slice(first, min(first + step, count)) for first in range(0, count, step))

    def _check(self, plan: StepPlan) -> None:
        """What the kernels rely on; they don't check bounds."""
        shape, ids = self.shape, plan.token_ids
        tokens, limit = int(plan.num_tokens.sum()), shape.max_num_batched_tokens
        if not self._free:
            raise RuntimeError(f"step {plan.step}: {SLOTS} steps are in flight already")
        if tokens != len(ids) or tokens > limit:
            raise ValueError(f"step {plan.step}: num_tokens add up to {tokens}, {len(ids)} ids, at most {limit}")
        if ids.size and not (ids.min() >= PLACEHOLDER and ids.max() < shape.decoder.vocab_size):
            raise ValueError(f"step {plan.step}: token ids {ids.min()} to {ids.max()} are outside the vocabulary")
        if np.any(plan.starts < 0) or np.any(plan.starts + plan.num_tokens > shape.max_model_len):
            raise ValueError(f"step {plan.step}: a row goes beyond max_model_len {shape.max_model_len}")
        blocks = [block for update in plan.block_updates for block in update.blocks]
        blocks += [block for copy in plan.block_copies for block in (copy.source, copy.target)]
        if blocks and not (min(blocks) >= 0 and max(blocks) < shape.num_blocks):
            raise ValueError(f"step {plan.step}: blocks {min(blocks)} to {max(blocks)} outside [0, {shape.num_blocks})")


def _copies(copies: tuple[BlockCopy, ...]) -> Iterator[tuple[int, Int32Array]]:
    """Group and pairs of source and target of each run of copies in one KV group."""
    for group, run in groupby(copies, key=lambda copy: copy.group):
        yield group, np.array([(copy.source, copy.target) for copy in run], np.int32)


def _words(masks: Any, tile: slice, width: int) -> Any:
    return masks[tile.start * width : tile.stop * width]
