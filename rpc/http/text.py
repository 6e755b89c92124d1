"""/tokenize, /detokenize and /tokenizer_info, with vLLM's bodies: what clients need to count a prompt's tokens."""

import asyncio
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from rpc.errors import renamed
from rpc.http.chat import render
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
        texts = await asyncio.to_thread(lambda text_of: [text_of(i) for i in ids], engine.tokenizer.token_text)
    body = {"count": len(ids), "max_model_len": engine.info.max_model_len, "tokens": ids, "token_strs": texts}
    return JSONResponse(body)


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
