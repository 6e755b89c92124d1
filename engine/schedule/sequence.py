"""Sequence: one choice of a request as the scheduler sees it.

Two bases of truth per sequence: *scheduled*, what was launched, and *computed*, what has settled.
Tokens sampled by a step that has not settled are placeholders: they count as known, so that the
next step can be launched before the host has seen them.

    token_ids          settled ids, the prompt's first
    known              len(token_ids) + num_placeholders
    in_flight          steps that hold the sequence and have not settled
    num_scheduled      tokens whose keys and values were launched; <= known
    num_computed       the settled part of num_scheduled; while decoding, what of it is in full blocks

A sequence is *decoding* from the step that samples its first token until it ends or is preempted: its one
pending token is the one sampled last for its row. Positions below `decodes_until` take nothing but a launch:
there is room in a block of its own, and the token is wanted. Beams are never decoding: they wait to be told.

The loop's task owns it; only the modules of `engine/schedule/` change it, except for `push_plain`:
what its publisher has for a token that has nothing but its text, None while there is no such thing.
"""

from collections.abc import Callable
from dataclasses import replace
from enum import Enum, auto

from engine.grammar.grammar import Grammar
from engine.kv.manager import BlockTable
from engine.kv.prefix import root_of
from engine.plan import RowState
from engine.request.outputs import FinishReason
from engine.request.params import SamplingParams

Finish = tuple[FinishReason, int | str | None]
"""Why a sequence ended: finish reason and stop reason."""


class Status(Enum):
    """PENDING (a choice before its fork) or WAITING -> RUNNING -> FINISHED; preemption goes back to WAITING."""

    PENDING = auto()
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """State of one choice."""

    __slots__ = (
        "arrival",
        "awaits_branch",
        "bad_words",
        "cache_root",
        "decodes_until",
        "end_ids",
        "eos_token_ids",
        "epoch",
        "fork_rows",
        "forks",
        "grammar",
        "in_flight",
        "in_flight_unsampled",
        "index",
        "is_decoding",
        "max_len",
        "max_output",
        "num_cached_tokens",
        "num_computed",
        "num_passed_over",
        "num_prompt_logprobs_launched",
        "num_scheduled",
        "params",
        "priority",
        "prompt_len",
        "protected",
        "push_plain",
        "request_id",
        "row",
        "seed",
        "share",
        "status",
        "stopping_ids",
        "tables",
        "tenant",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        max_output: int,
        seed: int,
        eos_token_ids: tuple[int, ...] = (),
        index: int = 0,
        priority: int = 0,
        tenant: str = "",
        client: str = "",
        cache_salt: str = "",
        bad_words: tuple[tuple[int, ...], ...] = (),
        grammar: Grammar | None = None,
    ) -> None:
        self.request_id = request_id
        self.index = index
        self.params = params
        self.prompt_len = len(prompt_token_ids)
        self.token_ids = list(prompt_token_ids)
        self.max_output = max_output
        self.max_len = self.prompt_len + max_output
        self.seed = seed
        self.bad_words = bad_words
        self.grammar = grammar
        self.eos_token_ids = eos_token_ids
        self.end_ids = frozenset(() if params.ignore_eos else eos_token_ids)
        self.stopping_ids = self.end_ids.union(params.stop_ids)
        self.priority = priority
        self.tenant = tenant
        self.share = tenant or client
        self.cache_root = root_of(tenant, cache_salt)
        self.arrival = 0
        self.status = Status.PENDING
        self.forks: tuple[Sequence, ...] = ()
        self.fork_rows: list[int] = []
        self.row = -1
        self.tables: list[BlockTable] = []
        self.epoch = 0
        self.in_flight = 0
        self.in_flight_unsampled = 0
        self.num_scheduled = 0
        self.num_computed = 0
        self.num_cached_tokens = 0
        self.num_passed_over = 0
        self.num_prompt_logprobs_launched = 0
        self.protected = False
        self.awaits_branch = False
        self.is_decoding = False
        self.decodes_until = 0
        self.push_plain: Callable[[int], None] | None = None

    @property
    def num_placeholders(self) -> int:
        """Tokens sampled by steps that have not settled. One count for steps in flight and one for those of them
        that sample nothing: a row that decodes, as most do, changes only the first."""
        return self.in_flight - self.in_flight_unsampled

    @property
    def known(self) -> int:
        """Tokens that exist, seen by the host or not."""
        return len(self.token_ids) + self.num_placeholders

    @property
    def num_output(self) -> int:
        """Settled output tokens."""
        return len(self.token_ids) - self.prompt_len

    @property
    def pending(self) -> int:
        """Tokens that could be computed now. The last token wanted is never computed; a beam waits to
        be told its next token, which is not the one sampled."""
        if self.is_decoding:
            return int(self.num_scheduled < self.max_len - 1)
        if self.params.use_beam_search and self.num_placeholders:
            return 0
        if self.max_output and self.known - self.prompt_len >= self.max_output:
            return 0
        return self.known - self.num_scheduled

    def pending_forks(self) -> list["Sequence"]:
        """The choices that will fork from this one where its prompt ends."""
        return [choice for choice in self.forks if choice.status is Status.PENDING]

    def row_state(self) -> RowState:
        """What the device needs to sample for this sequence."""
        p = self.params
        state = RowState(
            row=self.row,
            temperature=p.temperature,
            top_k=max(p.top_k, 0),
            top_p=p.top_p,
            min_p=p.min_p,
            seed=self.seed,
            choice=self.index,
            banned_ids=tuple(sorted(self.stopping_ids)) if p.min_tokens else (),
            min_position=self.prompt_len + min(p.min_tokens, self.max_output),
            num_logprobs=self._num_logprobs(),
            num_prompt_logprobs=-1 if p.prompt_logprobs is None else p.prompt_logprobs,
            presence_penalty=p.presence_penalty,
            frequency_penalty=p.frequency_penalty,
            repetition_penalty=p.repetition_penalty,
            logit_bias=tuple((p.logit_bias or {}).items()),
            allowed_ids=tuple(p.allowed_token_ids or ()),
            bad_words=self.bad_words,
        )
        if state.needs_history:
            return replace(state, token_ids=tuple(self.token_ids), prompt_len=self.prompt_len)
        return state

    def _num_logprobs(self) -> int:
        p = self.params
        if p.use_beam_search:
            return 2 * p.num_choices
        if p.logprobs is not None:
            return p.logprobs
        return -1 if p.best_of is None else 0

    def end_with_next(self) -> None:
        """The token that settles next is the last one wanted: the grammar has ended."""
        self.max_len = len(self.token_ids) + 1

    def end_of(self, token_id: int) -> Finish | None:
        """Finish reason and stop reason if `token_id`, just appended, ends the sequence."""
        if token_id in self.end_ids:
            return "stop", None
        if token_id in self.params.stop_ids:
            return "stop", token_id
        if self.grammar is not None and self.grammar.has_ended:
            return "stop", None
        if self.num_output >= self.max_output:
            return "length", None
        return None
