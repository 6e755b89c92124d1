"""SequenceFactory: turns what a caller asks for into sequences, or refuses it by the name of the field.

Whatever could break a step, or could never be served, stops here. Read next: `engine/schedule/sequence.py`.
"""

import logging
import random
from collections.abc import Sequence as Seq
from operator import index

from engine.config import EngineConfig
from engine.errors import InvalidRequest
from engine.grammar.grammar import Grammar, GrammarCompiler
from engine.request.params import MAX_SEED, SamplingParams
from engine.schedule.sequence import Sequence
from engine.text.tokenizer import TextTokenizer, need_tokenizer
from loader.checkpoint import Checkpoint

MAX_SALT_CHARS = 256

logger = logging.getLogger(__name__)


class SequenceFactory:
    """Knows the limits of one engine; draws the seeds of requests that bring none."""

    def __init__(
        self, config: EngineConfig, checkpoint: Checkpoint, max_model_len: int, tokenizer: TextTokenizer | None
    ) -> None:
        self._config = config
        self._vocab_size = checkpoint.decoder.vocab_size
        self._eos_token_ids = checkpoint.generation.eos_token_ids
        self._max_new_tokens = checkpoint.generation.max_new_tokens
        self._max_model_len = max_model_len
        self._tokenizer = tokenizer
        self.grammars: GrammarCompiler | None = None
        if tokenizer is not None:
            self.grammars = GrammarCompiler(tokenizer, self._vocab_size, self._eos_token_ids)
        self._random = random.Random(config.seed)
        self._told_stops: set[str] = set()

    def prompt_token_ids(self, prompt: str | Seq[int], params: SamplingParams) -> list[int]:
        """The prompt as ids, cut to its last `truncate_prompt_tokens`. Raises InvalidRequest."""
        if isinstance(prompt, str):
            prompt = need_tokenizer(self._tokenizer, "prompt").encode(prompt)
        try:
            kept = prompt if params.truncate_prompt_tokens is None else prompt[-params.truncate_prompt_tokens :]
            self._check_length(len(kept), params)  # before a look at the ids: at 60 million it takes the loop 2 s
            return list(map(index, kept))
        except TypeError as error:
            raise InvalidRequest("prompt", f"must be text or token ids: {error}") from error

    def sequences(
        self,
        request_id: str,
        token_ids: list[int],
        params: SamplingParams,
        *,
        priority: int,
        tenant: str,
        client: str = "",
        cache_salt: str = "",
    ) -> list[Sequence]:
        """One sequence per choice; the first holds the others as its forks. Raises InvalidRequest."""
        room = self._check_length(len(token_ids), params)
        self._check_token_ids(token_ids, params)
        self._check_limits(params)
        self._tell_of_stops(params)
        if len(cache_salt) > MAX_SALT_CHARS:
            raise InvalidRequest("cache_salt", f"has {len(cache_salt)} characters, more than {MAX_SALT_CHARS}")
        max_output = min(n for n in (room, params.max_tokens, self._max_new_tokens) if n is not None)
        seed = self._random.randrange(MAX_SEED + 1) if params.seed is None else params.seed
        bad_words = self._bad_word_ids(params)
        grammar = self._grammar(params)
        unwanted_ids = self._eos_token_ids if params.ignore_eos else ()
        choices = [
            Sequence(
                request_id,
                token_ids,
                params,
                max_output=max_output,
                seed=seed,
                eos_token_ids=self._eos_token_ids,
                index=choice,
                priority=priority,
                tenant=tenant,
                client=client,
                cache_salt=cache_salt,
                bad_words=bad_words,
                grammar=None if grammar is None else grammar.fork(unwanted_ids),
            )
            for choice in range(params.num_choices)
        ]
        choices[0].forks = tuple(choices[1:])
        return choices

    def _check_length(self, num_tokens: int, params: SamplingParams) -> int:
        """Tokens that fit behind a prompt of so many."""
        limit = self._max_model_len
        room = limit - num_tokens
        if not num_tokens:
            raise InvalidRequest("prompt", "is empty, at least one token is needed")
        if room < (params.max_tokens != 0):
            fits = f"at most {limit - 1} fit in max_model_len {limit}"
            raise InvalidRequest("prompt", f"has {num_tokens} tokens, {fits}")
        return room

    def _check_token_ids(self, token_ids: list[int], params: SamplingParams) -> None:
        last = self._vocab_size - 1
        for name, ids in (
            ("prompt", token_ids),
            ("stop_token_ids", params.stop_ids),
            ("logit_bias", params.logit_bias or ()),
            ("allowed_token_ids", params.allowed_token_ids or ()),
        ):
            bad = next((i for i in ids if not 0 <= i <= last), None)
            if bad is not None:
                raise InvalidRequest(name, f"token id {bad} is out of range, must be between 0 and {last}")

    def _check_limits(self, params: SamplingParams) -> None:
        rows, top = self._config.max_num_seqs, self._config.max_logprobs
        choices = "n" if params.best_of is None else "best_of"
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > top:
                raise InvalidRequest(name, f"{getattr(params, name)} is above max_logprobs {top}")
        if params.stop_strings and self._tokenizer is None:
            raise InvalidRequest("stop", "the model has no tokenizer, so there is no text to stop at")
        if params.use_beam_search and 2 * params.num_choices > top:
            raise InvalidRequest(
                choices, f"{params.num_choices} beams need twice as many logprobs, at most {top // 2} beams"
            )
        if params.num_choices > rows:
            raise InvalidRequest(choices, f"{params.num_choices} choices are above max_num_seqs {rows}")

    def _tell_of_stops(self, params: SamplingParams) -> None:
        """Warn, once for each, of stop strings that are special tokens, which are not in the text to stop at."""
        if self._tokenizer is None or not params.skip_special_tokens:
            return
        for stop in self._tokenizer.special_texts.intersection(params.stop_strings) - self._told_stops:
            self._told_stops.add(stop)
            logger.warning(
                "stop string %r is a special token, so it is not in the text and never found; "
                "give its id in stop_token_ids, or skip_special_tokens: false",
                stop,
            )

    def _bad_word_ids(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Token sequences of the bad words, each with and without a space before it, as in vLLM."""
        if not params.bad_words:
            return ()
        tokenizer = need_tokenizer(self._tokenizer, "bad_words")
        spellings = [form for word in params.bad_words for form in (word, " " + word.lstrip())]
        sequences = (tuple(tokenizer.encode(form, add_special_tokens=False, field="bad_words")) for form in spellings)
        return tuple(dict.fromkeys(s for s in sequences if s))

    def _grammar(self, params: SamplingParams) -> Grammar | None:
        if params.structured_outputs is None:
            return None
        if self.grammars is None:
            raise InvalidRequest("structured_outputs", "the model has no tokenizer; there is no text to constrain")
        return self.grammars.compile(params.structured_outputs)
