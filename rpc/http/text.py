"""/tokenize, /detokenize and /tokenizer_info, with vLLM's bodies: what clients need to count a prompt's tokens."""

import asyncio
from collections.abc import Sequence
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from engine.text.tokenizer import TextTokenizer
from rpc.http.chat import render
from rpc.http.errors import renamed
from rpc.http.fields import Fields
from rpc.http.service import Service


async def tokenize(service: Service, fields: Fields) -> ASGIApp:
    """Ids of `prompt`, or of `messages` under the chat template. Raises InvalidRequest."""
    engine = service.serving_engine(fields)
    text = fields.get("prompt", str)
    if (text is None) == (fields.raw("messages") is None):
        fields.refuse("prompt", "give prompt or messages")
    if text is None:
        tools = fields.children("tools")
        ids = await render(engine, fields, None if tools is None else [tool.as_dict() for tool in tools])
    else:
        with renamed({"text": "prompt"}):
            ids = await engine.tokenize(text, add_special_tokens=fields.flag("add_special_tokens", True))
    texts = None
    if fields.flag("return_token_strs") and engine.tokenizer is not None:
        texts = await asyncio.to_thread(_token_texts, engine.tokenizer, ids)
    body = {"count": len(ids), "max_model_len": engine.info.max_model_len, "tokens": ids, "token_strs": texts}
    return JSONResponse(body)


def _token_texts(tokenizer: TextTokenizer, ids: Sequence[int]) -> list[str]:
    """A text takes 2.5 us to make, so each is made once."""
    texts = {i: tokenizer.token_text(i) for i in set(ids)}
    return [texts[i] for i in ids]


async def detokenize(service: Service, fields: Fields) -> ASGIApp:
    """Text of `tokens`. Raises InvalidRequest."""
    engine = service.serving_engine(fields)
    ids = fields.list_of("tokens", int)
    if ids is None:
        fields.refuse("tokens", "is required")
    with renamed({"token_ids": "tokens"}):
        return JSONResponse({"prompt": await engine.detokenize(ids)})


async def tokenizer_info(service: Service, fields: Fields) -> ASGIApp:
    """Special tokens and chat template, from which lm-eval builds a tokenizer that asks this server."""
    checkpoint = service.serving_engine(fields).checkpoint
    info: dict[str, Any] = {**checkpoint.special_tokens, "chat_template": checkpoint.chat_template}
    return JSONResponse(info)
