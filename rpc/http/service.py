"""Service: what the endpoints share: the engine behind them, its model's name, and how requests are submitted.

Read next: `rpc/http/completions.py`, `rpc/http/chat.py`.
"""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

from engine.engine import Engine
from engine.errors import InvalidRequest
from engine.request.params import SamplingParams
from engine.serving.stream import OutputStream
from engine.text.tool_formats import tool_format
from rpc.auth import CLIENT, TENANT, ApiKeys
from rpc.calls import Calls, own_id, serving
from rpc.clock import Clock
from rpc.http.errors import UnknownModel
from rpc.http.fields import Fields
from rpc.options import ServerOptions
from rpc.outputs import Outputs


class Service:
    """One engine over HTTP.

    Attributes:
        keys: who may call; None for anybody.
        is_serving: the engine takes work and is not standing still.
        started: when, in seconds since 1970.
    """

    def __init__(
        self,
        engine: Engine,
        options: ServerOptions,
        calls: Calls,
        *,
        keys: ApiKeys | None,
        is_serving: Callable[[], bool],
        clock: Clock,
    ) -> None:
        self.engine = engine
        self.options = options
        self.calls = calls
        self.keys = keys
        self.is_serving = is_serving
        self.clock = clock
        self.started = int(time.time())
        self._numbers = itertools.count()

    @cached_property
    def tool_format(self) -> str | None:
        """How the model writes tool calls, None if nothing says so; for a loaded engine."""
        if self.options.tool_call_parser != "auto":
            return self.options.tool_call_parser
        template = self.engine.chat.template(for_tools=True)
        return None if template is None else tool_format(template)

    def serving_engine(self, fields: Fields) -> Engine:
        """The engine, if it takes work and is what `model` asks for. Raises EngineStopped and UnknownModel."""
        engine = serving(self.engine)
        model = fields.get("model", str)
        if model is not None and model not in engine.info.served_model_names:
            raise UnknownModel(model or "", engine.info.served_model_name)
        return engine

    def submit(
        self,
        call_id: str,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        fields: Fields,
        names: Mapping[str, str],
    ) -> Outputs:
        """Queue one request per prompt, all or none. Raises what `Engine.generate` does.

        `fields` say how they are queued; `names` are the caller's, by the engine's.
        """
        priority, salt = fields.get("priority", int) or 0, fields.get("cache_salt", str)
        if salt == "":
            fields.refuse("cache_salt", "is empty; leave it out, or give a text that nobody guesses")
        streams: list[OutputStream] = []
        self._check_room(prompts, params, fields)
        try:
            for prompt in prompts:
                # The caller may use an id twice, for tracing; the engine may not.
                request_id = own_id(f"{call_id}-{next(self._numbers)}")
                streams.append(
                    self.engine.generate(
                        prompt,
                        params,
                        request_id=request_id,
                        priority=priority,
                        tenant=TENANT.get(),
                        client=CLIENT.get(),
                        cache_salt=salt or "",
                    )
                )
        except BaseException:
            for stream in streams:
                stream.cancel()
            raise
        return Outputs(streams, self.calls, names)

    def _check_room(self, prompts: Sequence[Sequence[int]], params: SamplingParams, fields: Fields) -> None:
        """Refuse a limit that the caller has given and that the context cannot hold, as vLLM does."""
        wanted, limit = params.max_tokens, self.engine.info.max_model_len
        longest = max(map(len, prompts))
        is_given = any(fields.raw(name) is not None for name in ("max_tokens", "max_completion_tokens"))
        if wanted is not None and is_given and longest < limit < longest + wanted:
            raise InvalidRequest(
                "max_tokens", f"{wanted} and the prompt's {longest} tokens are more than max_model_len {limit}"
            )
