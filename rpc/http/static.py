"""The page's files, served as they lie in `rpc/http/page`. Its policy lets it load and ask nothing but this origin."""

from functools import partial
from pathlib import Path

from starlette.responses import Response
from starlette.types import ASGIApp

from rpc.http.fields import Fields
from rpc.http.service import Service

_FOLDER = Path(__file__).with_name("page")
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


async def _file(path: Path, service: Service, fields: Fields) -> ASGIApp:
    return Response(path.read_bytes(), media_type=_TYPES[path.suffix], headers=_HEADERS)


ROUTES = (
    ("GET", "/", partial(_file, _FOLDER / "index.html")),
    *(
        ("GET", f"/page/{path.name}", partial(_file, path))
        for path in sorted(_FOLDER.iterdir())
        if path.suffix in _TYPES and path.name != "index.html"
    ),
)
"""Method, path and handler of each."""
