"""Grammar: which tokens may come next in one output. Made by `GrammarCompiler` from StructuredOutputs, with llguidance.

A grammar is compiled once and kept; every sequence has a copy of it, which has advanced by the sequence's settled
tokens (a copy takes 6 us and shares what has been worked out). Compiling is for a thread other than the loop's.

Whatever the caller wrote, work is bounded. llguidance counts most of it and gives up at the limits given to it; what
it does not count, nested repetitions such as `(a{1000}){1000}` and ambiguity such as `e: e e | e e e | "a"`, shows
in the time of masks: a first one that takes longer than MASK_SECONDS is refused, and so much is what all later ones
of a request may take beyond STEADY_SECONDS each (`charge`). Masks take 10 to 100 us, 10 ms for the first of a schema of
1,500 properties. Read next: `engine/grammar/masks.py`, docs/structured-output.md.
"""

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from engine.errors import InvalidRequest
from engine.request.structured import StructuredOutputs
from engine.text.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

CACHED_GRAMMARS = 64
MAX_ERROR_CHARS = 400
"""Of llguidance's errors, which repeat what they are about."""
MASK_SECONDS = 0.1
"""Processor time, so that it does not depend on what else the machine does."""
STEADY_SECONDS = 0.001
STEP_SECONDS = 0.05
"""For all masks of a step. In one that takes longer, slow masks are charged as many times as much."""


class Grammar:
    """Where one output is in its grammar.

    Attributes:
        has_ended: nothing may follow the tokens so far.
        error: why it cannot go on, None while it can; it names the field.
        seconds: what the last mask took.
        unwanted_ids: not to be sampled while the grammar allows anything else.
    """

    __slots__ = ("_field", "_matcher", "_spent", "error", "has_ended", "seconds", "unwanted_ids")

    def __init__(self, matcher: "LLMatcher", field: str, unwanted_ids: tuple[int, ...] = ()) -> None:
        self._matcher = matcher
        self._field = field
        self.unwanted_ids = unwanted_ids
        self.has_ended = False
        self.seconds = 0.0
        self._spent = 0.0
        self.error: InvalidRequest | None = None

    def fork(self, unwanted_ids: tuple[int, ...] = ()) -> Self:
        """Another output, at the same place."""
        return type(self)(self._matcher.deep_copy(), self._field, unwanted_ids)

    def fill(self, address: int, nbytes: int) -> None:
        """Write the mask of what may come next, without the GIL."""
        began = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(address, nbytes)
        self.seconds = time.thread_time() - began
        if self._matcher.is_error():
            self.error = self._matcher_error()

    def charge(self, step_seconds: float) -> None:
        """Count the last mask, in a step whose masks took so long together; sets `error` when it was too much."""
        self._spent += max(0.0, self.seconds - STEADY_SECONDS) * max(1.0, step_seconds / STEP_SECONDS)
        if self._spent > MASK_SECONDS and self.error is None:
            reason = f"too complex: finding the next tokens took {MASK_SECONDS:g} s more than it may"
            self.error = InvalidRequest(self._field, reason)

    def advance(self, token_id: int) -> None:
        """The output has grown by a token that the mask allowed."""
        if not self._matcher.consume_token(token_id):
            self.error = self.error or self._matcher_error()
        self.has_ended = self.error is not None or self._matcher.is_stopped()

    def _matcher_error(self) -> InvalidRequest:
        return InvalidRequest(self._field, _one_line(self._matcher.get_error()))


class GrammarCompiler:
    """Compiles for one tokenizer, in any thread; keeps the grammars used last.

    Args:
        vocab_size: the model's; what it has beyond the tokenizer's is never allowed.
        eos_token_ids: allowed where a grammar may end.

    Attributes:
        vocab_size: of the masks: the model's, or the tokenizer's if that is larger.
    """

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = max(vocab_size, tokenizer.vocab_size)
        self._eos_token_ids = list(eos_token_ids)
        self._ll_tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._cache: OrderedDict[StructuredOutputs, Grammar] = OrderedDict()

    def has(self, wanted: StructuredOutputs) -> bool:
        """Whether `compile` would take no time."""
        return wanted in self._cache

    def compile(self, wanted: StructuredOutputs) -> Grammar:
        """The grammar at its start, to be forked. Raises InvalidRequest naming the field."""
        grammar = self._cache.get(wanted) or self._compile(wanted)
        with self._lock:
            self._cache[wanted] = grammar
            self._cache.move_to_end(wanted)
            if len(self._cache) > CACHED_GRAMMARS:
                self._cache.popitem(last=False)
        return grammar

    def _compile(self, wanted: StructuredOutputs) -> Grammar:
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError as error:
            reason = "needs llguidance on the server: pip install 'engine-llm[structured]'"
            raise InvalidRequest("structured_outputs", reason) from error
        # Half of its own limits or less: about 7 ms and 1 ms in a step, and 100 MB of states.
        limits = LLParserLimits(
            step_lexer_fuel=100_000, step_max_items=20_000, max_lexer_states=50_000, verbose_errors=False
        )
        field = f"structured_outputs.{wanted.kind}"
        try:
            source = _source(wanted, LLMatcher)
        except ValueError as error:
            raise InvalidRequest(field, _one_line(str(error))) from error
        matcher = LLMatcher(self._open_tokenizer(), source, log_level=0, limits=limits)
        grammar = Grammar(matcher, field)
        first = np.empty(-(-self.vocab_size // 32), np.uint32)  # it takes longest
        grammar.fill(first.ctypes.data, first.nbytes)
        grammar.charge(0.0)
        if grammar.error is not None:
            raise grammar.error
        return grammar

    def _open_tokenizer(self) -> "LLTokenizer":
        from llguidance import LLTokenizer

        with self._lock:
            if self._ll_tokenizer is None:
                try:
                    self._ll_tokenizer = LLTokenizer(
                        self._tokenizer.to_json(), n_vocab=self.vocab_size, eos_token=self._eos_token_ids or None
                    )
                except ValueError as error:
                    raise InvalidRequest("structured_outputs", f"not with this model's tokenizer: {error}") from error
            return self._ll_tokenizer


JSON_OPTIONS: Any = {"whitespace_pattern": r"[ \t]|\r?\n[ \t]{0,32}"}
"""Between JSON's parts a space, or a line break and its indentation: a small model left free writes nothing else."""


def _one_line(error: str) -> str:
    return " ".join(error.removesuffix("<non-verbose/>").split())[:MAX_ERROR_CHARS]


def _source(wanted: StructuredOutputs, ll: Any) -> str:
    """The constraint in llguidance's own form."""
    source: str
    match wanted.kind:
        case "json":
            source = ll.grammar_from_json_schema(wanted.json, defaults=JSON_OPTIONS)
        case "json_object":
            source = ll.grammar_from_json_schema('{"type": "object"}', defaults=JSON_OPTIONS)
        case "regex":
            source = ll.grammar_from_regex(wanted.regex)
        case "choice":
            source = ll.grammar_from_lark("start: " + " | ".join(map(json.dumps, wanted.choice or ())))
        case _:
            source = ll.grammar_from_lark(wanted.grammar)
    return source
