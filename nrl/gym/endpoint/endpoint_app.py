"""The endpoint as an ASGI application: which session a request belongs to, and what it is answered."""

import asyncio
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import attrs
import msgspec

from nrl.envs.types import Turn
from nrl.gym.endpoint import chat_completions, responses
from nrl.gym.endpoint.chat_request import DEPTH, VALUES, Asked, said_by, wrong_type
from nrl.gym.endpoint.fields import Unusable, shown, text_of
from nrl.gym.endpoint.sessions import KeptConversations
from nrl.gym.http.application import ARRIVING, Bodies
from nrl.gym.http.front import Application, Headers, Receive, Send
from nrl.gym.http.idempotency import Refused
from nrl.gym.http.json_limits import StrangeNumber, check_json, read_json
from nrl.log.redaction import redact

__all__ = ["LARGEST", "SESSION", "Answering", "application"]

SESSION = "nrl_session"
"""The key of a request's ``metadata`` that names its session, where neither the path nor the API key does."""
_PATH = re.compile(r"(?:/s/([^/]+))?(?:/v1)?/(chat/completions|responses|models|tokenize)(/.+)?")
LARGEST = 2**23
"""Bytes of a request: a context of a million tokens, and more."""
_UNDER_WAY = 16 * ARRIVING  # bytes of all requests that wait for an answer, unless one alone may be larger
_APIS: Mapping[str, Any] = {"chat/completions": chat_completions, "responses": responses}


class Answering(Protocol):
    """Who answers the requests of a session."""

    responses: KeptConversations
    """Conversations that a later request may go on with."""

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


def application(
    find: Callable[[str], Answering | None],
    model: str,
    *,
    aliases: Collection[str] = (),
    largest: int = LARGEST,
    by_metadata: Callable[[str], bool] = lambda key: False,
) -> Application:
    """An ASGI application.

    Args:
        find: the session of a name, which stands in the path (``/s/NAME/v1/...``) or is the API key.
        model: the name that the endpoint gives it.
        aliases: other names by which it may be asked for.
        largest: bytes that a request may have.
        by_metadata: whether who has a key may name the session in a request's ``metadata`` instead, under `SESSION`.
    """
    listed = {"id": model, "object": "model", "created": 0, "owned_by": "nrl"}
    bodies = Bodies(largest, under_way=max(_UNDER_WAY, largest))

    def check_model(name: str) -> None:
        if name not in ("", model, *aliases):
            raise Unusable(f"there is no model {name!r:.80}; it is {model!r}", "model_not_found", 404, "model")

    async def serve(scope: Any, receive: Receive, send: Send) -> None:
        headers: Headers = scope.get("nrl.headers") or Headers(scope["headers"])
        try:
            await answered(scope, headers, receive, send)
        except Refused as error:
            more = [(b"connection", b"close")] if error.unread else []
            more += [] if error.after is None else [(b"retry-after", b"%d" % error.after)]
            await _refuse(send, Unusable(str(error), error.code, error.status), more)
        except Unusable as error:
            unread = headers.is_long and error.status in (401, 404, 405)
            await _refuse(send, error, [(b"connection", b"close")] if unread else [])
        except Exception as error:  # whatever it is, a client of OpenAI's reads it
            await _refuse(send, Unusable(f"{type(error).__name__}: {error}", None, 500))
            raise

    async def answered(scope: Any, headers: Headers, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        if path == "/health":
            _check_method(path, method, "GET")
            await _send(send, b"{}")
            return
        found = _PATH.fullmatch(path)
        if found is None:
            raise Unusable(f"there is no {path:.80}; ask /v1/chat/completions, /v1/responses or /v1/models", status=404)
        if found[3] and found[2] != "models":
            raise Unusable(f"there is no {path:.80}; nothing is kept but what previous_response_id names", status=404)
        _check_method(path, method, "GET" if found[2] == "models" else "POST")
        key = headers.bearer.decode("latin-1")
        session = find(found[1] or key)
        if session is None and (method != "POST" or not by_metadata(key)):
            raise _unknown()
        if found[2] == "models":
            assert session is not None
            check_model(found[3][1:] if found[3] else "")
            await _send(send, msgspec.json.encode(listed if found[3] else {"object": "list", "data": [listed]}))
            return
        body, held = await bodies.read(receive, headers)
        try:
            request = _decoded(body)
            del body
            session = session or find(_named(request))
            if session is None:
                raise _unknown()
            if found[2] == "tokenize":
                check_model(_model_of(request))
                await _send(send, msgspec.json.encode(await asyncio.to_thread(session.tokenize, request)))
            else:
                check_model(_model_of(request))
                api = _APIS[found[2]]
                read = _read(api, request, session)
                instructions = 1 if request.get("instructions") else 0
                del request  # of which nothing else is looked at, and an answer may take minutes
                await answer(api, session, read, instructions, receive, send)
        finally:
            bodies.held -= held

    async def answer(
        api: Any, session: Answering, read: Asked, instructions: int, receive: Receive, send: Send
    ) -> None:
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
            told = asked.messages[instructions:]  # which hold for one request
            session.responses.add(f"resp_{name}", [*told, said_by(turns[0], first)])
        if asked.stream:
            await send({"type": "http.response.start", "status": 200, "headers": [_type(b"text/event-stream")]})
            for event in api.events(asked, turns, first, name):
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        else:
            await _send(send, msgspec.json.encode(api.answer(asked, turns, first, name)))

    return serve


def _read(api: Any, body: Any, session: Answering) -> Asked:
    name = body.get("previous_response_id") if isinstance(body, Mapping) and api is responses else None
    earlier = session.responses.get(text_of(body, "previous_response_id")) if name is not None else None
    if name is not None and earlier is None:
        message = f"previous_response_id: there is no response {shown(name)} in this session"
        raise Unusable(message, status=404, param="previous_response_id")
    try:
        found: Asked = api.read(body) if earlier is None else api.read(body, earlier)
    except (AttributeError, TypeError) as error:  # a field of another type than it has to have
        raise wrong_type(error) from None
    return found


def _check_method(path: str, method: str, known: str) -> None:
    if method != known and (method, known) != ("HEAD", "GET"):
        raise _WrongMethod(f"{path:.80} does not take {method:.20}, but {known}", known)


class _WrongMethod(Unusable):
    """A method that a path does not take; ``known`` is the one that it takes."""

    def __init__(self, message: str, known: str) -> None:
        super().__init__(message, "method_not_allowed", 405)
        self.known = known


def _model_of(body: Any) -> str:
    return text_of(body, "model") if isinstance(body, Mapping) else ""


def _unknown() -> Unusable:
    return Unusable(
        "the address or the API key is wrong: it is that of no session here; use what this one was given",
        "invalid_api_key",
        401,
    )


def _decoded(body: bytearray) -> Any:
    try:
        check_json(body, containers=VALUES, depth=DEPTH, values=VALUES)
        return read_json(body)
    except StrangeNumber as error:
        raise Unusable(str(error), param=error.where or None) from None
    except ValueError as error:
        raise Unusable(str(error)) from None


def _named(body: Any) -> str:
    """The session that a request names in its metadata, as where an agent has one address for all of its episodes."""
    metadata = body.get("metadata") if isinstance(body, Mapping) else None
    return str(metadata.get(SESSION, "")) if isinstance(metadata, Mapping) else ""


def _type(kind: bytes) -> tuple[bytes, bytes]:
    return b"content-type", kind


async def _refuse(send: Send, error: Unusable, more: Sequence[tuple[bytes, bytes]] = ()) -> None:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    headers = [*more]
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, _WrongMethod):
        headers.append((b"allow", b"GET, HEAD" if error.known == "GET" else error.known.encode()))
    text = redact(str(error).encode("utf-8", "backslashreplace").decode())
    said = {"message": text, "type": kind, "param": error.param, "code": error.code}
    await _send(send, msgspec.json.encode({"error": said}), error.status, headers)


async def _send(send: Send, body: bytes, status: int = 200, more: Sequence[tuple[bytes, bytes]] = ()) -> None:
    headers = [_type(b"application/json"), (b"content-length", b"%d" % len(body)), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
