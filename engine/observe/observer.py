"""Observer: what the loop tells about itself, turned into records and counts.

The loop marks the end of each phase, and says which step was launched, what settled and who left.
One clock reading serves every token of a step. Its own work is counted in the phase that follows.
What the whole iteration takes is in docs/performance.md.
Read next: `engine/observe/records.py`, `engine/observe/counters.py`, `engine/loop.py` (who calls it).
"""

import time
from collections.abc import Awaitable, Callable, Mapping

from engine.observe.counters import Counters
from engine.observe.records import LAUNCH, PHASES, SETTLE, IterationRecord, Profile, Records, RequestRecord
from engine.plan import StepResult
from engine.schedule.roster import Roster
from engine.schedule.sequence import Sequence
from engine.schedule.settle import Settlement
from engine.schedule.step import Step
from engine.serving.live_request import LiveRequest, RequestTimes

Clock = Callable[[], float]


class Observer:
    """Belongs to the loop's task; `records` and `counters` may be read by anybody."""

    def __init__(
        self,
        roster: Roster,
        counters: Counters | None = None,
        clock: Clock = time.perf_counter,
        spans: Callable[[RequestRecord, LiveRequest], None] | None = None,
    ) -> None:
        """`spans` is told of every request that has ended."""
        self.records = Records()
        self.counters = counters or Counters()
        self._roster = roster
        self._clock = clock
        self._spans = spans
        self._start = self._last = clock()
        self._idle = 0.0
        self._num_preemptions = 0
        self._num_noted = 0
        self._gained: list[Sequence] = []
        self._gained_times: list[RequestTimes] = []
        self._gained_at = 0.0
        self._gained_steps = 0
        self._reset()

    def _reset(self) -> None:
        self._spent = [0.0] * len(PHASES)
        self._step: Step | None = None
        self._prefill_rows = self._decode_rows = self._sampled = self._settled = 0
        self._device_seconds = 0.0

    # -- the iteration ----------------------------------------------------------------------

    def mark(self, phase: int) -> None:
        """`phase` ends now; it began where the one before it ended."""
        now = self._clock()
        self._spent[phase] += now - self._last
        self._last = now

    async def idle(self, wake: Awaitable[None]) -> None:
        """Sleep until `wake`. The iteration found nothing to do: it leaves no record, its time counts as idle."""
        if self._roster.is_idle:
            kv = self._roster.kv
            self.counters.leaked_blocks = kv.num_blocks - kv.num_available
        await wake
        now = self._clock()
        self._idle += now - self._start
        self._start = self._last = now
        self._reset()

    def launched(self, step: Step, live: Mapping[str, LiveRequest]) -> None:
        """A step's forward pass is on its way to the device; ends the phase "launch"."""
        scheduled = self._last
        self.mark(LAUNCH)
        self._step = step
        if step.plan.row_states:
            self._note_first_scheduled(step, live, scheduled)
        if self._spans is not None:
            self._note_preempted(live, scheduled)
        beams = sum([e.num_tokens == 1 and e.start >= e.sequence.prompt_len for e in step.entries])
        self._decode_rows = len(step.decoding.sequences) + beams
        self._prefill_rows = len(step.plan.rows) - self._decode_rows

    def _note_first_scheduled(self, step: Step, live: Mapping[str, LiveRequest], now: float) -> None:
        for entry in step.entries:
            sequence = entry.sequence
            times = live[sequence.request_id].times
            if times.scheduled is None:
                times.scheduled = now
                if self._roster.kv.enable_prefix_caching and sequence.params.prompt_logprobs is None:
                    self.counters.prefix_cache_queries += sequence.prompt_len
                    self.counters.prefix_cache_hits += sequence.num_cached_tokens

    def _note_preempted(self, live: Mapping[str, LiveRequest], now: float) -> None:
        if self._num_noted == self._roster.num_preemptions:
            return
        self._num_noted = self._roster.num_preemptions
        for request in live.values():
            noted = request.times.preempted
            noted += [now] * (sum(sequence.epoch for sequence in request.sequences) - len(noted))

    def settled(self, settlement: Settlement, result: StepResult, live: Mapping[str, LiveRequest]) -> None:
        """The oldest step has been taken in; ends the phase "settle"."""
        self.mark(SETTLE)
        if self._spans is not None:  # what was preempted without a launch
            self._note_preempted(live, self._last)
        self._settled = result.step
        self._device_seconds = result.device_seconds
        now = self._last
        gained = settlement.sequences
        if settlement.others:
            gained = gained + [s.sequence for s in settlement.others if s.token_id is not None and not s.faulted]
        if gained and gained == self._gained:
            self.counters.inter_token_latency.observe(now - self._gained_at, len(gained))
            self._gained_steps += 1
            self._sampled = len(gained)
        else:
            self._note_gained(gained, now, live)
        self._gained_at = now

    def _note_gained(self, gained: list[Sequence], now: float, live: Mapping[str, LiveRequest]) -> None:
        """Each of these gained a token; if the next step gives one to the same, nothing is noted per sequence."""
        self._write_gained()
        self._gained, self._gained_times = gained, []
        gaps: dict[float, int] = {}  # by when the token before settled
        for sequence in gained:
            request = live.get(sequence.request_id)
            if request is None:
                self._gained = []  # it does not count
                continue
            times, choice = request.times, sequence.index
            last = times.last_tokens[choice]
            if last is None:
                self._note_first_token(request, now)
            else:
                gaps[last] = gaps.get(last, 0) + 1
            times.last_tokens[choice] = now
            times.num_tokens[choice] += 1
            self._gained_times.append(times)
            self._sampled += 1
        for last, count in gaps.items():
            self.counters.inter_token_latency.observe(now - last, count)

    def _write_gained(self) -> None:
        """Note what steps that gave tokens to the same sequences left out: 13 us a step with 64 of them."""
        if self._gained_steps:
            for sequence, times in zip(self._gained, self._gained_times, strict=True):
                times.last_tokens[sequence.index] = self._gained_at
                times.num_tokens[sequence.index] += self._gained_steps
            self._gained_steps = 0

    def _note_first_token(self, request: LiveRequest, now: float) -> None:
        times = request.times
        if times.first_token is None:
            times.first_token = now
            self.counters.time_to_first_token.observe(now - times.arrival)
            self._count_prompt(request)

    def _count_prompt(self, request: LiveRequest) -> None:
        self.counters.prompt_tokens += request.sequences[0].prompt_len
        self.counters.prompt_tokens_cached += request.sequences[0].num_cached_tokens

    def end_iteration(self) -> None:
        """Leave the iteration's record."""
        roster, step = self._roster, self._step
        record = IterationRecord(
            start=self._start,
            idle=self._idle,
            phases=tuple(self._spent),
            launched=0 if step is None else step.plan.step,
            settled=self._settled,
            tokens=0 if step is None else len(step.plan.token_ids),
            prefill_rows=self._prefill_rows,
            decode_rows=self._decode_rows,
            sampled=self._sampled,
            running=len(roster.running),
            waiting=roster.num_waiting,
            kv_usage=roster.kv.usage,
            kv_fill=roster.kv_fill,
            preemptions=roster.num_preemptions - self._num_preemptions,
            device_seconds=self._device_seconds,
        )
        self.records.add_iteration(record)
        self.counters.add_iteration(record)
        self._num_preemptions = roster.num_preemptions
        self._idle = 0.0
        self._start = self._last
        self._reset()

    # -- requests ---------------------------------------------------------------------------

    def finished(self, live: LiveRequest) -> None:
        """A request leaves, whatever the reason; its channel has ended."""
        self._write_gained()
        first, times = live.sequences[0], live.times
        record = RequestRecord(
            request_id=live.request_id,
            arrival=times.arrival,
            scheduled=times.scheduled,
            first_token=times.first_token,
            last_token=max((t for t in times.last_tokens if t is not None), default=None),
            ended=self._clock(),
            prompt_tokens=first.prompt_len,
            cached_tokens=first.num_cached_tokens,
            output_tokens=sum(times.num_tokens),
            longest_choice=max(times.num_tokens),
            finish_reason=live.channel.finish_reason or "error",
        )
        if record.first_token is None and record.finish_reason == "length":
            self._count_prompt(live)  # a request for its prompt only
        self.records.add_request(record)
        self.counters.add_request(record)
        if self._spans is not None:
            self._spans(record, live)

    # -- profile ----------------------------------------------------------------------------

    def start_profile(self) -> None:
        """Keep records for `stop_profile` from now on."""
        self.records.start_profile(self._clock())

    def stop_profile(self) -> Profile:
        """What was kept since."""
        return self.records.stop_profile(self._clock())
