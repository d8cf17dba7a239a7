"""The description of a server as an OpenAPI document, made of the records that it reads and writes."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from nrl.gym.http import protocol

__all__ = ["Route", "openapi"]

_REFUSED = {
    400: "It is not what this path takes.",
    401: "The token is missing or wrong.",
    403: "The Host or the Origin is not one that may ask.",
    404: "There is no such session here.",
    405: "The path takes another method.",
    408: "It took longer than the client said, or arrived too slowly.",
    409: "The session went on, or was closed.",
    413: "It is too large.",
    415: "It is compressed.",
    422: "The environment raised.",
    429: "There is too much to do; ask again after Retry-After seconds.",
    431: "The headers are too long.",
    503: "The server is not ready, or stopping.",
}


class Route(NamedTuple):
    """What a path does.

    Args:
        method: of HTTP.
        does: a sentence.
        answer: from what was asked to the body.
        asked: the record of the request; None: it has no body.
        answered: the record of the answer; None: of no certain form.
        kind: the media type of the answer.
        open: whether it needs no token.
        digested: whether ``answer`` is given a digest of the body, too: requests that have the same are the same.
    """

    method: str
    does: str
    answer: Callable[..., Awaitable[bytes]]
    asked: Any = None
    answered: Any = None
    kind: bytes = b"application/json"
    open: bool = False
    digested: bool = False


def openapi(name: str, routes: Mapping[str, Route], *, secured: bool) -> dict[str, Any]:
    """The document.

    Args:
        name: of what is served.
        routes: by path.
        secured: whether a token is needed.
    """
    every = [protocol.Error, *(each for route in routes.values() for each in (route.asked, route.answered) if each)]
    found, components = msgspec.json.schema_components(every, ref_template="#/components/schemas/{name}")
    schemas = dict(zip(every, found, strict=True))
    security = {"bearer": {"type": "http", "scheme": "bearer"}} if secured else {}
    return {
        "openapi": "3.1.0",
        "info": {"title": f"nrl gym: {name}", "version": str(protocol.PROTOCOL)},
        "paths": {path: {route.method.lower(): _operation(path, route, schemas, secured)} for path, route in
                  routes.items()},
        "components": {"schemas": components, "securitySchemes": security},
    }  # fmt: skip


def _operation(path: str, route: Route, schemas: Mapping[Any, Any], secured: bool) -> dict[str, Any]:
    answered = {} if route.answered is None else {"schema": schemas[route.answered]}
    kind = route.kind.decode().partition(";")[0]
    wrong = {"application/json": {"schema": schemas[protocol.Error]}}
    refused = {str(status): {"description": why, "content": wrong} for status, why in _REFUSED.items()}
    operation: dict[str, Any] = {
        "operationId": path.strip("/"),
        "summary": route.does,
        "responses": {"200": {"description": "The answer.", "content": {kind: answered}}, **refused},
        "security": [{"bearer": []}] if secured and not route.open else [],
    }
    if route.asked is not None:
        content = {"application/json": {"schema": schemas[route.asked]}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation
