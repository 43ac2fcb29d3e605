"""The coordinator's HTTP interface: one table of routes, from which requests are served and the schema is made.

A request is refused before anything is allocated for it: protocol number, credential, size, then the body's keys and
types, then what the coordinator thinks of it. A refusal is JSON with a `reason` of one line. Nothing here is code or a
pickle: bodies are JSON, models and updates are safetensors files.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final, Literal, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from fedqueue import PROTOCOL, __version__
from fedqueue.coordinator.access import OPERATOR, Access
from fedqueue.coordinator.coordinator import Coordinator, Refused
from fedqueue.coordinator.facility_api import FacilityApi
from fedqueue.coordinator.limits import Limits, Uploads
from fedqueue.coordinator.openapi import BIGGEST, LONGEST, openapi
from fedqueue.coordinator.status import status
from fedqueue.coordinator.transfers import BlobConflict, BlobError, have, receive, send_file
from fedqueue.errors import ConfigError
from fedqueue.failpoints import failpoint
from fedqueue.protocol.codec import Json, encode, read
from fedqueue.protocol.contract import Answer, one_line, sequence_of
from fedqueue.protocol.reports import Foreseen, Handin, Poll, Scored, Started
from fedqueue.tensorfile import TensorFileError, UnreadableFileError

T = TypeVar("T")

BODY_LIMIT: Final = 1 << 20
"""Bytes of a JSON body."""
BODY_SECONDS: Final = 30.0
"""By when it must be there."""
KEY_LENGTH: Final = 100
"""Characters of a key in JSON: a metric's name is the longest."""
SAID_LENGTH: Final = 300
"""Characters of a reason: it may quote what it refuses."""
SHA256: Final = re.compile(r"[0-9a-f]{64}")
PROTOCOLS: Final = (PROTOCOL, PROTOCOL - 1)

Who = Literal["anyone", "facility", "operator"]
Reply = Response | Answer | Json


@dataclass(frozen=True, kw_only=True)
class Enrolment:
    token: str

    def __post_init__(self) -> None:
        if not 1 <= len(self.token) <= 200:
            raise ValueError("token must be 1 to 200 characters")


@dataclass(frozen=True, kw_only=True)
class Call:
    """One request, as a handler sees it: who asks, the numbers and names of its path, its body."""

    who: str
    request: Request
    path: Json
    body: Any


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """One row of the table."""

    method: str
    path: str
    who: Who
    handle: Callable[[Api, Call], Awaitable[Reply]]
    body: type | None = None
    query: tuple[str, ...] = ()
    about: str = ""


class Api:
    def __init__(self, coordinator: Coordinator, access: Access, address: Callable[[], Json]) -> None:
        self.coordinator = coordinator
        self.access = access
        self.facility_api = FacilityApi(coordinator)
        self.address = address
        self.limits = Limits()
        self.uploads = Uploads()
        self.app = Starlette(
            routes=[Route(e.path, _Served(self, e), methods=[e.method]) for e in ENDPOINTS],
            exception_handlers={HTTPException: _plain, Exception: _plain},
        )
        self.app.router.redirect_slashes = False  # it would send callers to where their Host header says

    async def ask(self, question: Callable[[], T]) -> T:
        """Have the coordinator's thread do this."""
        return await asyncio.wrap_future(self.coordinator.ask(question))

    def who(self, request: Request, allowed: Who) -> str:
        """The facility that asks, or the operator; nobody's name where anyone may. Costs the coordinator nothing."""
        said = request.headers.get("fedqueue-protocol", str(PROTOCOL))
        if said not in map(str, PROTOCOLS):
            raise Refused(426, f"protocol {said[:20]!r} is not spoken here, only {PROTOCOL}; update one of the two")
        if allowed == "anyone":
            return ""
        scheme, _, secret = request.headers.get("authorization", "").partition(" ")
        who = self.access.who(secret) if scheme.lower() == "bearer" and secret else None
        if who is None:
            raise Refused(401, "who asks? the credential is missing, unknown or revoked; enrol this facility")
        if (who == OPERATOR) != (allowed == "operator"):
            raise Refused(403, f"this is for {allowed}s alone")
        return who


class _Served:
    """One row of the table at work."""

    def __init__(self, api: Api, endpoint: Endpoint) -> None:
        self._api, self._endpoint = api, endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with ExitStack() as held:  # until the answer is sent, which may be a large file
            response = await self._answer(Request(scope, receive), held)
            await response(scope, receive, send)

    async def _answer(self, request: Request, held: ExitStack) -> Response:
        api, endpoint = self._api, self._endpoint
        try:
            who = api.who(request, endpoint.who)
            if who:
                held.enter_context(api.limits.one_more(who))
            path = {name: _path_value(name, value) for name, value in request.path_params.items()}
            path |= {name: _whole(request.query_params.get(name), name) for name in endpoint.query}
            given = await _json(request, endpoint.body) if endpoint.body is not None else None
            answer = await endpoint.handle(api, Call(who=who, request=request, path=path, body=given))
        except Refused as error:
            return _Json({"reason": _said(error), **error.facts}, error.status)
        except ConfigError as error:  # a body that does not fit
            return _Json({"reason": _said(error).removeprefix("body.")}, 422)
        except BlobConflict as error:
            return _Json({"reason": str(error), "offset": error.have}, error.status)
        except BlobError as error:
            return _Json({"reason": str(error)}, error.status)
        except ClientDisconnect:
            return Response(status_code=400)
        except Exception as error:
            api.coordinator.say(f"{endpoint.method} {endpoint.path}: ours: {type(error).__name__}: {_said(error)}")
            raise
        return answer if isinstance(answer, Response) else _Json(answer)


class _Json(Response):
    """Of our types too."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return encode(content).encode()


# Handlers -----------------------------------------------------------------------------------------------


async def _health(api: Api, call: Call) -> Json:
    return {"protocol": PROTOCOL, "version": __version__}


async def _schema(api: Api, call: Call) -> Json:
    return _document()


@cache
def _document() -> Json:
    return openapi(ENDPOINTS)


async def _enrol(api: Api, call: Call) -> Json:
    found = await api.ask(lambda: api.access.enrol(call.body.token))
    if found is None:
        raise Refused(403, "the token is unknown, used already or too old; ask for a new invitation")
    return {"facility": found[0], "credential": found[1], "run": api.coordinator.config.run.name}


async def _poll(api: Api, call: Call) -> Reply:
    _must_be_this_run(api, call)
    api.limits.reports(call.who, len(call.body.reports))

    def poll() -> Answer:
        known = api.facility_api.must_follow(call.who, call.body)
        _must_be_its_own(api.coordinator, call.who, call.body, known)
        return api.facility_api.poll(call.who, call.body)

    answer = await api.ask(poll)
    is_older = call.request.headers.get("fedqueue-protocol") == str(PROTOCOL - 1)
    return _in_protocol_1(answer) if is_older else answer


def _must_be_this_run(api: Api, call: Call) -> None:
    ours, theirs = api.coordinator.run_id, call.body.run
    if theirs not in ("", ours):
        raise Refused(409, f"this is run {ours}, not {theirs[:20]!r}; enrol this facility with it, in another home")


def _in_protocol_1(answer: Answer) -> Json:
    """Its agents know jobs by their numbers, and take no key that they do not know."""
    made: Json = json.loads(encode(answer))
    for order in made["orders"]:
        order["sequence"] = sequence_of(order.pop("job_id"))
        order["after"] = None if order["after"] is None else sequence_of(order["after"])
        for name in ("facility", "expected_delay", "replaces"):
            del order[name]
        if order["assignment"] is not None:
            del order["assignment"]["cutoff"]
    if made["standing"] is not None:
        made["standing"]["next_cutoff_in"] = made["standing"].pop("next_cutoff")
    return made


def _must_be_its_own(coordinator: Coordinator, facility: str, asked: Poll, known: int) -> None:
    """Refuse reports of what this facility was never given: they would be in the ledger for good. Who was given it
    learns by the number of the newest report that is `known` that our ledger was set back."""
    models, ordered = coordinator.outcomes.models, coordinator.state.facilities[facility].ordered
    for report in asked.reports:
        where = f"report {report.n}"
        if isinstance(report, Scored):
            if coordinator.config.evaluation.where != facility:
                raise Refused(403, f"{where}: this facility does not score models")
            if report.version not in models:
                raise Refused(422, f"{where}: there is no model {report.version}")
        elif isinstance(report, Foreseen):
            continue
        elif report.sequence >= ordered:
            raise Refused(422, f"{where}: job {report.sequence} was never ordered", received=known)
        elif isinstance(report, Started) and report.bound and report.bound.base_version not in models:
            raise Refused(422, f"{where}: there is no model {report.bound.base_version}")


async def _model(api: Api, call: Call) -> Response:
    version, headers = call.path["version"], call.request.headers
    path, digest = await api.ask(lambda: api.facility_api.model(version))
    sha256 = None if api.coordinator.store.is_untouched(path) else digest

    def failed(error: TensorFileError) -> None:
        api.coordinator.ask(lambda: api.facility_api.cannot_send(version, error))

    try:
        return send_file(path, headers.get("range"), digest, headers.get("if-range"), sha256, failed)
    except OSError as error:
        found = UnreadableFileError(path, error)
        raise await api.ask(lambda: api.facility_api.cannot_send(version, found)) from None


async def _offset(api: Api, call: Call) -> Json:
    at = call.path
    path = await api.ask(lambda: api.facility_api.may_upload(call.who, at["sequence"], at["attempt"], at["sha256"], 8))
    return {"offset": have(path)}


async def _upload(api: Api, call: Call) -> Json:
    at, update = call.path, _update(call)
    size = at["bytes"]
    path = await api.ask(
        lambda: api.facility_api.may_upload(call.who, at["sequence"], at["attempt"], at["sha256"], size)
    )
    there = await api.uploads.write(
        update, lambda: receive(call.request, path, offset=at["offset"], total=size), lambda: have(path)
    )
    if there == size:
        failpoint("upload.stored")
    return {"offset": there}


async def _commit(api: Api, call: Call) -> Reply:
    at, update = call.path, _update(call)
    _must_be_this_run(api, call)
    if call.body.part:
        raise Refused(422, "part must be 0: a job of this run hands in once")
    with api.uploads.checked(update) as goes_on:
        await api.uploads.end(update)
        over = partial(api.uploads.release, update)
        answer = await api.facility_api.commit(call.who, at["sequence"], at["attempt"], at["sha256"], call.body, over)
        if answer.status == "checking":
            goes_on()
    return _Json(answer, 202 if answer.status == "checking" else 200)


def _update(call: Call) -> tuple[str, int, int, str]:
    return call.who, call.path["sequence"], call.path["attempt"], call.path["sha256"]


async def _status(api: Api, call: Call) -> Json:
    return await api.ask(lambda: status(api.coordinator, api.access))


async def _steer(api: Api, call: Call) -> Json:
    act = {"pause": api.coordinator.pause, "resume": api.coordinator.resume, "stop": api.coordinator.stop}
    word = call.path["word"]
    if word not in act:
        raise Refused(404, f"a run can be told {', '.join(act)}, not {word!r}")
    await api.ask(act[word])
    return {"done": word, "hindrance": api.coordinator.state.hindrance}


async def _facility(api: Api, call: Call) -> Json:
    name, word = call.path["facility"], call.path["word"]
    if name not in api.coordinator.names:
        raise Refused(404, f"there is no facility {name!r}; there are {', '.join(api.coordinator.names)}")
    if word == "invite":
        return {"token": await api.ask(lambda: api.access.invite(name)), **api.address()}
    if word == "revoke":
        had = await api.ask(lambda: api.access.revoke(name))
        await api.uploads.end_all(name)
        return {"done": word, "had": had}
    act = {"drain": api.coordinator.drain, "join": api.coordinator.join}
    if word not in act:
        raise Refused(404, f"a facility can be told {', '.join((*act, 'invite', 'revoke'))}, not {word!r}")
    await api.ask(lambda: act[word](name))
    return {"done": word}


UPDATE: Final = "/v1/updates/{sequence}/{attempt}/{sha256}"

ENDPOINTS: Final = (
    Endpoint(method="GET", path="/v1/health", who="anyone", handle=_health, about="is it there"),
    Endpoint(method="GET", path="/v1/openapi.json", who="anyone", handle=_schema, about="this interface"),
    Endpoint(method="POST", path="/v1/enroll", who="anyone", handle=_enrol, body=Enrolment, about="a token, once"),
    Endpoint(method="POST", path="/v1/poll", who="facility", handle=_poll, body=Poll, about="reports, and what to do"),
    Endpoint(method="GET", path="/v1/models/{version}", who="facility", handle=_model, about="a model, or a part"),
    Endpoint(method="GET", path=UPDATE, who="facility", handle=_offset, about="how many bytes of an update are here"),
    Endpoint(
        method="PUT", path=UPDATE, who="facility", handle=_upload, query=("offset", "bytes"), about="bytes of an update"
    ),
    Endpoint(method="POST", path=UPDATE, who="facility", handle=_commit, body=Handin, about="all bytes are here"),
    Endpoint(method="GET", path="/v1/status", who="operator", handle=_status, about="how the run gets on"),
    Endpoint(method="POST", path="/v1/run/{word}", who="operator", handle=_steer, about="pause, resume, stop"),
    Endpoint(
        method="POST",
        path="/v1/facilities/{facility}/{word}",
        who="operator",
        handle=_facility,
        about="drain, join, invite, revoke",
    ),
)


# Reading ------------------------------------------------------------------------------------------------


def _path_value(name: str, text: str) -> Any:
    if name in ("version", "sequence", "attempt"):
        return _whole(text, name)
    if name == "sha256" and not SHA256.fullmatch(text):
        raise Refused(422, "sha256 must be 64 hexadecimal digits in lower case")
    return text


def _whole(text: str | None, name: str) -> int:
    if text is None or not re.fullmatch(r"[0-9]{1,15}", text):
        raise Refused(422, f"{name} must be a whole number, 0 or more")
    return int(text)


async def _json(request: Request, kind: type) -> Any:
    try:
        async with asyncio.timeout(BODY_SECONDS):
            data = await _body(request)
    except TimeoutError:
        raise Refused(408, f"the body took more than {BODY_SECONDS:g} s") from None
    try:
        given = json.loads(
            data.decode("utf-8"), parse_int=_int, parse_float=_float, parse_constant=_constant, object_pairs_hook=_pairs
        )
        json.dumps(given, ensure_ascii=False).encode()  # JSON can name halves of characters, which nobody can write
        return read(kind, given, "body")
    except (ValueError, TypeError, RecursionError) as error:  # TypeError: a list where a word should be
        raise Refused(400, f"the body is not JSON as it should be: {error}") from None


async def _body(request: Request) -> bytes:
    declared = request.headers.get("content-length", "0")
    data = bytearray()
    if re.fullmatch("[0-9]{1,9}", declared) and int(declared) <= BODY_LIMIT:
        async for piece in request.stream():
            data += piece
            if len(data) > BODY_LIMIT:
                break
        else:
            return bytes(data)
    raise Refused(413, f"the body may have {BODY_LIMIT} bytes")


def _int(text: str) -> int:
    if len(text) > 17 or abs(int(text)) > BIGGEST:
        raise ValueError(f"the number {text[:20]} is too large")
    return int(text)


def _float(text: str) -> float:
    value = float(text)
    if abs(value) > LONGEST:
        raise ValueError(f"the number {text[:20]} is too large")
    return value


def _constant(text: str) -> float:
    raise ValueError(f"{text} is not a number of JSON")


def _pairs(pairs: list[tuple[str, Any]]) -> Json:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key comes twice")
    if any(len(key) > KEY_LENGTH for key in made):
        raise ValueError(f"a key has more than {KEY_LENGTH} characters")
    return made


def _said(error: Exception) -> str:
    text = one_line(str(error))
    return text if len(text) <= SAID_LENGTH else f"{text[:SAID_LENGTH]}..."


async def _plain(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return _Json({"reason": error.detail}, error.status_code, headers=error.headers)
    return _Json({"reason": f"ours: {type(error).__name__}; please report it"}, 500)
