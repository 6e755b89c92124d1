"""What the server says about itself: models, version, health, readiness, metrics."""

import asyncio
from collections.abc import Sequence
from typing import Any

from prometheus_client import generate_latest
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from engine import __version__
from rpc.calls import loaded
from rpc.http.errors import UnknownModel
from rpc.http.fields import Fields
from rpc.http.service import Service

PLAIN_METRICS = "text/plain; version=0.0.4; charset=utf-8"


async def models(service: Service, fields: Fields) -> ASGIApp:
    """The one model, in OpenAI's list, under each of its names."""
    return JSONResponse({"object": "list", "data": [_model(service, name) for name in _names(service)]})


async def model(service: Service, fields: Fields) -> ASGIApp:
    """The model by its name. Raises UnknownModel."""
    names, wanted = _names(service), fields.get("model", str) or ""
    if wanted not in names:
        raise UnknownModel(wanted, names[0])
    return JSONResponse(_model(service, wanted))


def _names(service: Service) -> Sequence[str]:
    return loaded(service.engine).info.served_model_names


def _model(service: Service, name: str) -> dict[str, Any]:
    info = service.engine.info
    return {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "engine-llm",
        "root": info.model,
        "parent": None,
        "max_model_len": info.max_model_len,
    }


async def version(service: Service, fields: Fields) -> ASGIApp:
    """The engine's version."""
    return JSONResponse({"version": __version__})


async def health(service: Service, fields: Fields) -> ASGIApp:
    """Whether the process should be left alone: 503 when the engine has failed or stands still with work to do."""
    engine = service.engine
    is_well = service.is_serving() if engine.state == "serving" else engine.state != "failed"
    return JSONResponse({"state": engine.state}, 200 if is_well else 503)


async def ready(service: Service, fields: Fields) -> ASGIApp:
    """Whether requests should be sent here: not while the engine starts, drains or stands still."""
    return JSONResponse({"state": service.engine.state}, 200 if service.is_serving() else 503)


async def metrics(service: Service, fields: Fields) -> ASGIApp:
    """What `--metrics-port` gives, too; made in a thread, since it takes 3 ms."""
    text = await asyncio.to_thread(generate_latest, service.engine.metrics)
    return Response(text, media_type=PLAIN_METRICS)
