"""OpenAI-compatible HTTP as a way to send a load, by aiohttp (extra `bench`).

/v1/completions gets token ids, so that lengths are exact. /v1/chat/completions gets text, which the server's own
/detokenize makes of the ids before time counts; prompt lengths are then what the server's `usage` says.
"""

import json
from ssl import SSLContext
from types import TracebackType
from typing import Any, Self

import aiohttp

from engine.cli.bench.load import Answer, BackendError, Target
from engine.cli.bench.workload import PlannedRequest

VOCABULARY = 10_000
"""HTTP servers do not tell how large theirs is; ids below this are in nearly all."""


class OpenAIBackend:
    """One client of one server. Use with `async with`."""

    def __init__(
        self,
        url: str,
        *,
        chat: bool,
        model: str | None,
        sampling: dict[str, Any],
        api_key: str | None,
        ssl: SSLContext | None,
    ) -> None:
        """`sampling` goes into every request; without `model`, the first that the server lists is asked."""
        self._root = url.rstrip("/").removesuffix("/v1")
        self._chat = chat
        self._model = model
        self._sampling = sampling
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._ssl = ssl

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=0, ssl=self._ssl or True),
            timeout=aiohttp.ClientTimeout(total=None),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def target(self) -> Target:
        """The model to ask. Raises BackendError."""
        listed = (await self._json("GET", "/v1/models"))["data"]
        names = [row["id"] for row in listed]
        name = self._model or next(iter(names), "")
        if name not in names:
            raise BackendError(f"model: {name!r} is not served there; {', '.join(names)} is")
        self._model = name
        return Target(name, VOCABULARY, listed[names.index(name)].get("max_model_len"))

    async def prepare(self, request: PlannedRequest) -> bytes:
        """The request's body."""
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": request.output_len,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._sampling,
        }
        if self._chat:
            made = await self._json("POST", "/detokenize", {"model": self._model, "tokens": request.prompt})
            body["messages"] = [{"role": "user", "content": made["prompt"]}]
        else:
            body["prompt"] = request.prompt
        return json.dumps(body, separators=(",", ":")).encode()

    async def send(self, prepared: bytes, answer: Answer) -> None:
        """Read the events of an answer. Raises BackendError."""
        path = "/v1/chat/completions" if self._chat else "/v1/completions"
        rest = b""
        try:
            async with self._session.post(self._root + path, data=prepared) as response:
                if response.status != 200:
                    raise BackendError(_refusal(response.status, await response.read()))
                async for chunk in response.content.iter_any():
                    *events, rest = (rest + chunk).split(b"\n\n")
                    for event in events:
                        _take(event, answer)
        except (aiohttp.ClientError, OSError) as error:
            raise BackendError(_no_answer(error)) from error

    async def _json(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            async with self._session.request(method, self._root + path, json=body) as response:
                content = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            answers = not isinstance(error, aiohttp.ClientConnectorError)
            hint = "; what answers may not speak HTTP: is it the gRPC port?" if answers else ""
            raise BackendError(f"{self._root}{path}: {_no_answer(error)}{hint}") from error
        if response.status != 200:
            raise BackendError(f"{self._root}{path}: {_refusal(response.status, content)}")
        try:
            answer: dict[str, Any] = json.loads(content)
        except ValueError as error:
            raise BackendError(f"{self._root}{path}: the answer is not JSON") from error
        return answer


def _take(event: bytes, answer: Answer) -> None:
    """One event: a message with tokens, the usage at the end, an error, or nothing of interest."""
    document = event.removeprefix(b"data:").strip()
    if len(document) == len(event) or document == b"[DONE]":
        return
    message = json.loads(document)
    if "error" in message:
        raise BackendError(str(message["error"].get("message", message["error"])))
    for choice in message.get("choices", ()):
        if _has_tokens(choice):
            answer.came()
            answer.output_tokens += 1
        if choice.get("finish_reason") in ("abort", "error"):
            raise BackendError(f"the answer ended early: {choice['finish_reason']}")
    if usage := message.get("usage"):
        answer.prompt_tokens, answer.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]


def _has_tokens(choice: dict[str, Any]) -> bool:
    """A chat begins with a piece that has only a role, and may end with one that has nothing."""
    delta = choice.get("delta")
    return delta is None or any(value for name, value in delta.items() if name != "role")


def _refusal(status: int, content: bytes) -> str:
    try:
        return f"{status}: {json.loads(content)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"{status}: {' '.join(content[:200].decode(errors='replace').split()) or 'no reason given'}"


def _no_answer(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
