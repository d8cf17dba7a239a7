"""The endpoint as an ASGI application: which session a request belongs to, and what it is answered."""

import asyncio
import re
import secrets
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import attrs
import msgspec

from nrl.envs.contract import Turn
from nrl.envs.endpoint import chat_completions, responses
from nrl.envs.endpoint.asked import Asked, Unusable, said_by, wrong_type
from nrl.envs.gym.application import Application, Receive, Send
from nrl.envs.gym_config.defaults import LARGEST

__all__ = ["SESSION", "Answering", "application"]

SESSION = "nrl_session"
"""The key of a request's ``metadata`` that names its session, where neither the path nor the API key does."""
_PATH = re.compile(r"(?:/s/([^/]+))?(?:/v1)?/(chat/completions|responses|models|tokenize)(/.+)?")
_KEPT = 10_000  # responses of a session
_APIS: Mapping[str, Any] = {"chat/completions": chat_completions, "responses": responses}


class Answering(Protocol):
    """Who answers the requests of a session."""

    responses: dict[str, list[Mapping[str, Any]]]
    """Conversations that a later request may go on with, by the id of the response at their end; the newest."""

    ids: bool
    """Whether all answers have the tokens that they are made of."""

    async def ask(self, asked: Asked, left: "asyncio.Future[Any]") -> tuple[list[Turn], int] | None:
        """The turns that answer a request, and the number of the first of them; raises `Unusable`.

        ``left`` is done when the client leaves; then there is no answer.
        """
        ...

    def tokenize(self, body: Any) -> dict[str, Any]:
        """The tokens of a prompt, as vLLM tells them; in any thread; raises `Unusable`."""
        ...


def application(find: Callable[[str], Answering | None], model: str, *, by_metadata: bool = False) -> Application:
    """An ASGI application.

    Args:
        find: the session of a name, which stands in the path (``/s/NAME/v1/...``) or is the API key.
        model: the name that the endpoint gives it.
        by_metadata: whether it may stand in a request's ``metadata`` instead, under `SESSION`. Then the requests of
            strangers are read.
    """
    listed = {"id": model, "object": "model", "created": 0, "owned_by": "nrl"}

    async def serve(scope: Any, receive: Receive, send: Send) -> None:
        try:
            await answered(scope, receive, send)
        except Unusable as error:
            await _refuse(send, str(error), error.code, error.status)
        except Exception as error:  # whatever it is, a client of OpenAI's reads it
            await _refuse(send, f"{type(error).__name__}: {error}", None, 500)
            raise

    async def answered(scope: Any, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        if path == "/health":
            await _send(send, b"{}")
            return
        found = _PATH.fullmatch(path)
        if found is None:
            raise Unusable(f"there is no {path:.80}; ask /v1/chat/completions, /v1/responses or /v1/models", status=404)
        if found[3] and found[2] != "models":
            raise Unusable(f"there is no {path:.80}; nothing is kept but what previous_response_id names", status=404)
        if method != ("GET" if found[2] == "models" else "POST"):
            raise Unusable(f"{path:.80} does not take {method:.20}", status=405)
        session = find(found[1] or _key(scope["headers"]))
        if session is None and not (by_metadata and method == "POST"):
            raise _unknown()
        body = None if method == "GET" else await _body(receive)
        session = session or find(_named(body))
        if session is None:
            raise _unknown()
        if found[2] == "models":
            if found[3] not in (None, f"/{model}"):
                raise Unusable(f"there is no model {found[3][1:]!r:.80}; it is {model!r}", "model_not_found", 404)
            await _send(send, msgspec.json.encode(listed if found[3] else {"object": "list", "data": [listed]}))
            return
        if found[2] == "tokenize":
            await _send(send, msgspec.json.encode(await asyncio.to_thread(session.tokenize, body)))
        else:
            await asked(_APIS[found[2]], session, body, receive, send)

    async def asked(api: Any, session: Answering, body: Any, receive: Receive, send: Send) -> None:
        read = _read(api, body, session)
        asked = attrs.evolve(read, ids=read.ids or session.ids, model=read.model or model)
        left = asyncio.ensure_future(receive())  # which comes when the client leaves
        try:
            found = await session.ask(asked, left)
        finally:
            left.cancel()
        if found is None:
            return
        turns, first = found
        name = secrets.token_hex(16)  # which nobody else can guess
        if api is responses and asked.stored:
            told = asked.messages[bool(body.get("instructions")) :]  # which hold for one request
            session.responses[f"resp_{name}"] = [*told, said_by(turns[0], first)]
            while len(session.responses) > _KEPT:
                del session.responses[next(iter(session.responses))]
        if asked.stream:
            await send({"type": "http.response.start", "status": 200, "headers": [_type(b"text/event-stream")]})
            for event in api.events(asked, turns, first, name):
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        else:
            await _send(send, msgspec.json.encode(api.answer(asked, turns, first, name)))

    return serve


def _read(api: Any, body: Any, session: Answering) -> Asked:
    earlier = body.get("previous_response_id") if isinstance(body, Mapping) and api is responses else None
    if earlier is not None and str(earlier) not in session.responses:
        raise Unusable(f"previous_response_id: there is no response {earlier!r:.80} in this session", status=404)
    try:
        found: Asked = api.read(body) if earlier is None else api.read(body, session.responses[str(earlier)])
    except (AttributeError, TypeError) as error:  # a field of another type than it has to have
        raise wrong_type(error) from None
    return found


def _unknown() -> Unusable:
    return Unusable(
        "the address or the API key is wrong: it is that of no session here; use what this one was given", status=401
    )


async def _body(receive: Receive) -> Any:
    parts, size, more = list[bytes](), 0, True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > LARGEST:
            raise Unusable(f"the request has more than {LARGEST} bytes; send less", status=413)
        more = message.get("more_body", False)
    try:
        return msgspec.json.decode(b"".join(parts))
    except (ValueError, RecursionError) as error:
        raise Unusable(f"the request is no JSON: {error}") from None


def _key(headers: Any) -> str:
    for name, value in headers:
        if name == b"authorization":
            return str(value.decode("latin-1")).partition(" ")[2].strip()
    return ""


def _named(body: Any) -> str:
    """The session that a request names in its metadata, as where an agent has one address for all of its episodes."""
    metadata = body.get("metadata") if isinstance(body, Mapping) else None
    return str(metadata.get(SESSION, "")) if isinstance(metadata, Mapping) else ""


def _type(kind: bytes) -> tuple[bytes, bytes]:
    return b"content-type", kind


async def _refuse(send: Send, why: str, code: str | None, status: int) -> None:
    kind = "invalid_request_error" if status < 500 else "server_error"
    said = {"message": why, "type": kind, "param": None, "code": code}
    await _send(send, msgspec.json.encode({"error": said}), status=status)


async def _send(send: Send, body: bytes, status: int = 200) -> None:
    headers = [_type(b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
