"""The coordinator's HTTP interface: one table of routes, from which requests are served and the schema is made.

A request is refused before anything is allocated for it: protocol number, credential, rate, size, then how much is in
the body, then its keys and types, then what the coordinator thinks of it; who asks is looked at again before that. A
refusal is JSON with a `reason` of one line. Nothing here is code or a pickle: bodies are JSON, models and updates are
safetensors files.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from contextvars import ContextVar
from dataclasses import replace
from functools import cache, partial
from typing import Any, Final, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from fedqueue import PROTOCOL, __version__
from fedqueue.coordinator.access import OPERATOR, Access, Limits, changed, plain_name, revoke
from fedqueue.coordinator.audit import Audit
from fedqueue.coordinator.coordinator import Coordinator, Refused
from fedqueue.coordinator.endpoints import Call, Endpoint, address_of
from fedqueue.coordinator.facility_api import FacilityApi
from fedqueue.coordinator.older_protocol import OldAnswer, in_older_words
from fedqueue.coordinator.openapi import BIGGEST, LONGEST, Schema, openapi
from fedqueue.coordinator.page_api import PAGE, status_of
from fedqueue.coordinator.rights import RIGHTS, Right, who_may
from fedqueue.coordinator.status import status
from fedqueue.coordinator.transfers import BlobConflict, BlobError, Update, Uploads, have, receive, send_file
from fedqueue.errors import ConfigError, StorageError
from fedqueue.files import failpoint
from fedqueue.page.pages import Pages, Source
from fedqueue.protocol.codec import Json, encode, read
from fedqueue.protocol.contract import MOST_REPORTS, Address, Answer, Invitation, Verdict, one_line
from fedqueue.protocol.reports import ForecastMade, Handin, Poll, Scored, Started, Took
from fedqueue.protocol.service import (
    Done,
    Enrolled,
    EnrolmentRequest,
    Health,
    MaskedHandin,
    Offset,
    RefusalBody,
    Renewed,
    RunStatus,
)
from fedqueue.tensorfile import TensorFileError, UnreadableFileError

log = logging.getLogger(__name__)

T = TypeVar("T")

BODY_SECONDS: Final = 30.0
"""By when it must be there."""
SMALL_BODY: Final = 16 << 10
"""Bytes that are read at once; more are read in a thread."""
VALUES: Final = 40_000
"""In a body: so many are in the longest poll that an agent makes, with some to spare."""
KEY_LENGTH: Final = 100
"""Characters of a key in JSON: a metric's name is the longest."""
SAID_LENGTH: Final = 300
"""Characters of a reason: it may quote what it refuses."""
SHA256: Final = re.compile(r"[0-9a-f]{64}")
OLDER: Final = ("1", "2")
"""Protocols whose agents are served too."""

RENEW: Final = "FedQueue-Renew"
"""A header of answers: it is time to ask for a new credential."""

Reply = Response | Verdict | Answer | OldAnswer | Invitation | Enrolled | Offset | Done | RunStatus | Health | Schema


_may_still_ask: ContextVar[Callable[[], object]] = ContextVar("_may_still_ask", default=lambda: None)
"""Of the request that is being served: refuses who was revoked since it came."""


class Service:
    """Serves a table of endpoints."""

    pages: Pages | None = None  # of runs, live; None: it has none
    open_reading = False  # anybody may look at those pages

    def __init__(self, access: Access, endpoints: Sequence[Endpoint], audit: Audit) -> None:
        self.access = access
        self.audit = audit
        self.limits = Limits()
        self.reader = ThreadPoolExecutor(1, thread_name_prefix="reader")  # of large bodies
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="writer")  # of what must be on the disk
        self.app = Starlette(
            routes=[Route(e.path, _Served(self, e), methods=[e.method]) for e in endpoints],
            exception_handlers={HTTPException: _plain, Exception: _plain},
        )
        self.app.router.redirect_slashes = False  # it would send callers to where their Host header says

    def close(self) -> None:
        if self.pages is not None:
            self.pages.close()
        self.reader.shutdown(wait=True, cancel_futures=True)
        self.writer.shutdown(wait=True, cancel_futures=True)

    async def note(self, call: Call, what: str, **facts: str) -> None:
        """On record before it is done."""
        noting = partial(self.audit.note, what, plain_name(call.who), call.address, **facts)
        await self.write(lambda: changed(noting))

    async def note_refusal(self, what: str, who: str, address: str) -> None:
        due = self.audit.refusals(what, plain_name(who), address)
        if due:
            with suppress(StorageError):  # what is refused is refused
                await self.write(partial(self.audit.note_refusals, due))

    def where(self) -> dict[str, str]:
        """What the audit says of all that is done here."""
        return {}

    async def write(self, act: Callable[[], T]) -> T:
        """Have something done that waits for the disk: one after the other."""
        return await asyncio.get_running_loop().run_in_executor(self.writer, act)

    def who(self, request: Request, right: Right | None, *, under_way: bool = False) -> str:
        """Who asks, which must have that right; nobody's name where anyone may. Costs the coordinator nothing.
        `under_way`: the request was begun before."""
        said = request.headers.get("fedqueue-protocol", str(PROTOCOL))
        if said not in (str(PROTOCOL), *OLDER):
            raise Refused(426, f"protocol {said[:20]!r} is not spoken here, only {PROTOCOL}; update one of the two")
        if right is None:
            return ""
        secret = secret_of(request)
        who = self.access.who(secret, under_way=under_way) if secret else None
        role = self.access.role_of(who) if who is not None else None
        if who is None or role is None:
            if secret and self.access.has_expired(secret):
                raise Refused(401, "this credential has expired; ask the operator for a new one")
            raise Refused(401, "who asks? the credential is missing, unknown or revoked; ask the operator for another")
        if right not in RIGHTS[role]:
            raise Refused(403, f"this is for {who_may(right)} alone")
        return who


def secret_of(request: Request) -> str:
    """The credential that comes with it; empty: none."""
    scheme, _, secret = request.headers.get("authorization", "").partition(" ")
    return secret if scheme.lower() == "bearer" else ""


class Api(Service):
    """Of one run."""

    def __init__(
        self,
        coordinator: Coordinator,
        access: Access,
        address: Address,
        audit: Audit,
        *,
        hosted: bool = False,
        owner: str = OPERATOR,
    ) -> None:
        """`hosted`: by a federation, which says who may ask. `owner`: who submitted the run."""
        super().__init__(access, ENDPOINTS, audit)
        self.coordinator = coordinator
        self.facility_api = FacilityApi(coordinator)
        self.address = address
        self.hosted = hosted
        self.owner = owner
        self.uploads = Uploads()
        if not hosted:
            self.open_reading = coordinator.config.server.open_reading
            name = coordinator.config.run.name
            shown = Source(
                id=coordinator.run_id,
                name=name,
                folder=coordinator.folder,
                steer="v1",
                status=status_of(coordinator, access),
            )
            self.pages = Pages(lambda: [shown], title=name)

    async def overview(self, who: str) -> Mapping[str, Any]:
        return {}

    def at_work(self) -> list[Coordinator]:
        return [self.coordinator]

    async def ask(self, question: Callable[[], T]) -> T:
        """Have the coordinator's thread do this, unless who asks was revoked, which is done there too."""
        may_still_ask = _may_still_ask.get()

        def act() -> T:
            may_still_ask()
            return question()

        return await asyncio.wrap_future(self.coordinator.ask(act))

    def where(self) -> dict[str, str]:
        return {"run": self.coordinator.folder.name}

    def close(self) -> None:
        self.facility_api.close()
        super().close()

    def who(self, request: Request, right: Right | None, *, under_way: bool = False) -> str:
        who = super().who(request, right, under_way=under_way)
        role = self.access.role_of(who)
        if right is None or role is None or RIGHTS[role][right] == "all" or right == "renew":
            return who
        if role == "facility" and who not in self.coordinator.names:
            raise Refused(403, f"{who} takes no part in this run")
        if role != "facility" and who != self.owner:
            raise Refused(403, f"this run is {plain_name(self.owner)}'s: only its owner and operators may do that")
        return who


class _Served:
    """One row of the table at work."""

    def __init__(self, api: Service, endpoint: Endpoint) -> None:
        self._api, self._endpoint = api, endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with ExitStack() as held:  # until the answer is sent, which may be a large file
            response = await self._answer(Request(scope, receive), held)

            async def goes_on(message: Message) -> None:
                if message.get("more_body"):  # piece after piece of a model
                    _may_still_ask.get()()
                await send(message)

            await response(scope, receive, goes_on)

    async def _answer(self, request: Request, held: ExitStack) -> Response:
        api, endpoint = self._api, self._endpoint
        who = ""
        try:
            secret = secret_of(request)
            right = None if endpoint.public and api.open_reading and not secret else endpoint.right
            who = api.who(request, right)
            if who:
                held.enter_context(api.limits.one_more(who))
                _may_still_ask.set(partial(api.who, request, endpoint.right, under_way=True))
                request.state.known(who)
                if api.access.is_new(secret):
                    with suppress(StorageError):  # the one before works until that can be written
                        await api.write(partial(api.access.used, secret))
            path = {name: _path_value(name, value) for name, value in request.path_params.items()}
            path |= {name: _whole(request.query_params.get(name), name) for name in endpoint.query}
            given = await _json(api, who, request, endpoint) if endpoint.body is not None else None
            call = Call(who=who, secret=secret, request=request, path=path, body=given)
            if endpoint.noted:
                await api.note(call, endpoint.noted, **api.where(), **{key: str(value) for key, value in path.items()})
            answer = await endpoint.handle(api, call)
        except Refused as error:
            if error.status in (401, 403):
                await self._note_refusal(request, who, error)
            elif endpoint.noted and who:
                await api.note_refusal(f"{endpoint.noted}: not done, {error.status}", who, address_of(request))
            body = RefusalBody(reason=_said(error), received=error.received, offset=error.offset)
            return _Json(body, error.status)
        except ConfigError as error:  # a body that does not fit
            return _Json(RefusalBody(reason=_said(error).removeprefix("body.")), 422)
        except BlobConflict as error:
            return _Json(RefusalBody(reason=str(error), offset=error.have), error.status)
        except BlobError as error:
            return _Json(RefusalBody(reason=str(error)), error.status)
        except ClientDisconnect:
            return Response(status_code=400)
        except Exception as error:
            log.error(f"{endpoint.method} {endpoint.path}: ours: {type(error).__name__}: {_said(error)}")
            raise
        made = answer if isinstance(answer, Response) else _Json(answer)
        if who and api.access.is_due(secret):
            made.headers[RENEW] = "1"
        return made

    async def _note_refusal(self, request: Request, who: str, error: Refused) -> None:
        """Of who has no good credential, or not the right to do this."""
        api, secret = self._api, secret_of(request)
        if not who and not secret:
            what = "refused: no credential" if error.status == 401 else "refused: a token"
        elif error.status == 401:
            what = (
                "refused: a credential that has expired" if api.access.has_expired(secret) else "refused: a credential"
            )
        else:
            who, what = api.access.who(secret) or who, f"refused: {self._endpoint.about}"
        await api.note_refusal(what, who, address_of(request))


class _Json(Response):
    """Of our types too."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return encode(content).encode()


# Handlers -----------------------------------------------------------------------------------------------


async def _health(api: Api, call: Call) -> Health:
    return Health(protocol=PROTOCOL, version=__version__)


async def _schema(api: Api, call: Call) -> Response:
    return Response(_document(), media_type="application/json")


@cache
def _document() -> bytes:
    return encode(openapi(ENDPOINTS)).encode()


async def _enrol(api: Api, call: Call) -> Enrolled:
    _must_be_alone(api)
    await note_enrolment(api, call)
    found = await api.ask(lambda: changed(lambda: api.access.enrol(call.body.token)))
    return enrolled(found, api.coordinator.config.run.name)


async def note_enrolment(api: Service, call: Call) -> None:
    """A token that is not good is noted when it is refused."""
    facility = api.access.invited(call.body.token)
    if facility is not None:
        await api.note(call, "enrolled", facility=facility)


def enrolled(found: tuple[str, str] | None, run: str) -> Enrolled:
    if found is None:
        raise Refused(403, "the token is unknown, used already or too old; ask for a new invitation")
    return Enrolled(facility=found[0], credential=found[1], run=run)


async def _renew(api: Service, call: Call) -> Renewed:
    found = await api.write(lambda: changed(lambda: api.access.renew(call.secret)))
    if found is None:
        raise Refused(409, "this credential need not be renewed yet")
    return Renewed(credential=found)


def _must_be_alone(api: Api) -> None:
    if api.hosted:
        raise Refused(404, "who may ask is for the whole federation to say: name its folder instead of the run's")


async def answer_poll(api: Api, who: str, said: Poll) -> Answer:
    _must_be_this_run(api, said.run)
    api.limits.reports(who, len(said.reports))

    def poll() -> Answer:
        known = api.facility_api.must_follow(who, said)
        _must_be_its_own(api.coordinator, who, said, known)
        return api.facility_api.poll(who, said)

    return await api.ask(poll)


async def _poll(api: Api, call: Call) -> Reply:
    answer = await answer_poll(api, call.who, call.body)
    return in_older_words(answer) if call.request.headers.get("fedqueue-protocol") in OLDER else answer


def _must_be_this_run(api: Api, theirs: str) -> None:
    ours = api.coordinator.run_id
    if theirs not in ("", ours):
        raise Refused(409, f"this is run {ours}, not {theirs[:20]!r}; enrol this facility with it, in another home")


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
        elif isinstance(report, ForecastMade):
            continue
        elif report.sequence >= ordered:
            raise Refused(422, f"{where}: job {report.sequence} was never ordered", received=known)
        elif isinstance(report, Started | Took) and report.bound and report.bound.work.base_version not in models:
            raise Refused(422, f"{where}: there is no model {report.bound.work.base_version}")


async def _model(api: Api, call: Call) -> Response:
    version, headers = call.path["version"], call.request.headers
    path, digest = await api.ask(lambda: api.facility_api.model(version))

    def failed(error: TensorFileError) -> None:
        api.coordinator.ask(lambda: api.facility_api.cannot_send(version, error))

    try:
        content = await api.facility_api.content(version, digest)
        return send_file(path, headers.get("range"), digest, headers.get("if-range"), content, failed)
    except TensorFileError as error:
        found = error
    except OSError as error:
        found = UnreadableFileError(path, error)
    raise await api.ask(lambda: api.facility_api.cannot_send(version, found))


async def _offset(api: Api, call: Call) -> Offset:
    return Offset(offset=have(await api.ask(lambda: api.facility_api.may_upload(_update(call), 8))))


async def _upload(api: Api, call: Call) -> Offset:
    at, update, size = call.path, _update(call), call.path["bytes"]
    path = await api.ask(lambda: api.facility_api.may_upload(update, size))

    async def bring() -> int:
        _may_still_ask.get()()  # from here on a revocation knows of it
        return await receive(call.request, path, offset=at["offset"], total=size)

    there = await api.uploads.write(update, bring, lambda: have(path))
    if there == size:
        failpoint("upload.stored")
    return Offset(offset=there)


async def _commit(api: Api, call: Call) -> Reply:
    update = _update(call)
    _must_be_this_run(api, call.body.run)
    if call.body.part != update.part:
        raise Refused(422, f"part must be {update.part}, as the path says, found {call.body.part}")
    with api.uploads.checked(update) as goes_on:
        await api.uploads.end(update)
        over = partial(api.uploads.release, update)
        answer = await api.facility_api.commit(update, call.body, api.ask, over)
        if answer.status == "checking":
            goes_on()
    return _Json(answer, 202 if answer.status == "checking" else 200)


def _given(call: Call) -> Update:
    """What a facility gives to the group of a model, as the bytes of an update that no job brings."""
    return Update(f"{call.who}@masked", call.path["version"], 0, 0, call.path["sha256"])


async def _given_offset(api: Api, call: Call) -> Offset:
    at = call.path
    size = await api.ask(lambda: api.facility_api.size_of_gift(at["version"]))
    path = await api.ask(lambda: api.facility_api.may_give(call.who, at["version"], size, at["sha256"]))
    return Offset(offset=have(path))


async def _give(api: Api, call: Call) -> Offset:
    at = call.path
    path = await api.ask(lambda: api.facility_api.may_give(call.who, at["version"], at["bytes"], at["sha256"]))

    async def bring() -> int:
        _may_still_ask.get()()
        return await receive(call.request, path, offset=at["offset"], total=at["bytes"])

    return Offset(offset=await api.uploads.write(_given(call), bring, lambda: have(path)))


async def _given_all(api: Api, call: Call) -> Verdict:
    with api.uploads.checked(_given(call)):
        await api.uploads.end(_given(call))
        at = call.path
        return await api.facility_api.give(call.who, at["version"], at["sha256"], call.body.group, api.ask)


def _update(call: Call) -> Update:
    at = call.path
    return Update(call.who, at["sequence"], at["attempt"], at.get("part", 0), at["sha256"])


async def _status(api: Api, call: Call) -> RunStatus:
    found = await api.ask(lambda: status(api.coordinator, api.access))
    return found if call.who == OPERATOR else replace(found, folder="")


def _steering(word: str) -> Endpoint:
    async def steer(api: Api, call: Call) -> Done:
        await api.ask(getattr(api.coordinator, word))
        return Done(done=word, hindrance=api.coordinator.state.hindrance)

    return Endpoint(
        method="POST", path=f"/v1/run/{word}", right="steer", handle=steer, about=f"{word} the run", noted=word
    )


async def _roll_back(api: Api, call: Call) -> Done:
    await api.ask(lambda: api.coordinator.roll_back(call.path["version"]))
    return Done(done="rollback", hindrance=api.coordinator.state.hindrance)


def of_facility(word: str, right: Right, handle: Callable[[Any, Call], Awaitable[Any]]) -> Endpoint:
    path = f"/v1/facilities/{{facility}}/{word}"
    return Endpoint(method="POST", path=path, right=right, handle=handle, about=f"{word} a facility", noted=word)


def _facility(api: Api, call: Call) -> str:
    name: str = call.path["facility"]
    if name not in api.coordinator.names:
        raise Refused(404, f"there is no facility {name!r}; there are {', '.join(api.coordinator.names)}")
    return name


async def _drain(api: Api, call: Call) -> Done:
    name = _facility(api, call)
    await api.ask(lambda: api.coordinator.drain(name))
    return Done(done="drain")


async def _join(api: Api, call: Call) -> Done:
    name = _facility(api, call)
    await api.ask(lambda: api.coordinator.join(name))
    return Done(done="join")


async def _invite(api: Api, call: Call) -> Invitation:
    _must_be_alone(api)
    name = _facility(api, call)
    token, at = await api.ask(lambda: changed(lambda: api.access.invite(name))), api.address
    return Invitation(url=at.url, token=token, certificate=at.certificate, run=at.run)


def _revoking(word: str, *, keep: bool) -> Endpoint:
    async def take_back(api: Api, call: Call) -> Done:
        _must_be_alone(api)
        name = _facility(api, call)
        had = await api.ask(lambda: revoke(api.coordinator, api.access, name, keep=keep))
        await api.uploads.end_all(name)
        return Done(done=word, had=had)

    return of_facility(word, "manage", take_back)


def enrolling(handle: Callable[[Any, Call], Awaitable[Enrolled]]) -> Endpoint:
    return Endpoint(
        method="POST",
        path="/v1/enroll",
        right=None,
        handle=handle,
        body=EnrolmentRequest,
        most=4 << 10,
        about="a token, once",
    )


RENEWAL: Final = Endpoint(
    method="POST", path="/v1/credential", right="renew", handle=_renew, about="a new credential, when it is time"
)

UPDATE: Final = "/v1/updates/{sequence}/{attempt}/{sha256}"
PART: Final = "/v1/updates/{sequence}/{attempt}/part-{part}/{sha256}"  # of a job that stays, after its first
MASKED: Final = "/v1/masked/{version}/{sha256}"

Handle = Callable[[Any, Call], Awaitable[Any]]


def _bringing(path: str, what: str, offset: Handle, bring: Handle, commit: Handle, body: type) -> tuple[Endpoint, ...]:
    """A file of many bytes: asked about, sent, and committed."""
    there = f"how many bytes of {what} are here"
    return (
        Endpoint(method="GET", path=path, right="train", handle=offset, about=there),
        Endpoint(
            method="PUT", path=path, right="train", handle=bring, query=("offset", "bytes"), about=f"bytes of {what}"
        ),
        Endpoint(
            method="POST", path=path, right="train", handle=commit, body=body, most=64 << 10, about="all bytes are here"
        ),
    )


ENDPOINTS: Final = (
    Endpoint(method="GET", path="/v1/health", right=None, handle=_health, about="is it there"),
    Endpoint(method="GET", path="/v1/openapi.json", right=None, handle=_schema, about="this interface"),
    enrolling(_enrol),
    Endpoint(method="POST", path="/v1/poll", right="train", handle=_poll, body=Poll, about="reports, and what to do"),
    Endpoint(method="GET", path="/v1/models/{version}", right="train", handle=_model, about="a model, or a part"),
    *_bringing(UPDATE, "an update", _offset, _upload, _commit, Handin),
    *_bringing(PART, "an update", _offset, _upload, _commit, Handin),
    *_bringing(MASKED, "what a facility gives to a group", _given_offset, _give, _given_all, MaskedHandin),
    RENEWAL,
    Endpoint(method="GET", path="/v1/status", right="look", handle=_status, about="how the run gets on"),
    _steering("pause"),
    _steering("resume"),
    _steering("stop"),
    Endpoint(
        method="POST",
        path="/v1/rollback/{version}",
        right="steer",
        handle=_roll_back,
        about="take back every model after this one",
        noted="rollback",
    ),
    of_facility("drain", "steer", _drain),
    of_facility("join", "steer", _join),
    of_facility("invite", "manage", _invite),
    _revoking("revoke", keep=False),
    _revoking("revoke-and-keep", keep=True),
    *PAGE,
)


# Reading ------------------------------------------------------------------------------------------------


def _path_value(name: str, text: str) -> Any:
    if name in ("version", "sequence", "attempt", "part"):
        return _whole(text, name)
    if name == "sha256" and not SHA256.fullmatch(text):
        raise Refused(422, "sha256 must be 64 hexadecimal digits in lower case")
    return text


def _whole(text: str | None, name: str) -> int:
    if text is None or not re.fullmatch(r"[0-9]{1,15}", text):
        raise Refused(422, f"{name} must be a whole number, 0 or more")
    return int(text)


async def _json(api: Service, who: str, request: Request, endpoint: Endpoint) -> Any:
    assert endpoint.body is not None
    declared = request.headers.get("content-length", "0")
    if not re.fullmatch("[0-9]{1,9}", declared) or int(declared) > endpoint.most:
        raise Refused(413, f"the body may have {endpoint.most} bytes")
    api.limits.bytes(who, int(declared))
    try:
        async with asyncio.timeout(BODY_SECONDS):
            data = b"".join([piece async for piece in request.stream()])
    except TimeoutError:
        raise Refused(408, f"the body took more than {BODY_SECONDS:g} s") from None
    if len(data) <= SMALL_BODY:
        return _decode(endpoint.body, data)
    async with api.limits.one_body(who):
        return await asyncio.get_running_loop().run_in_executor(api.reader, _decode, endpoint.body, data)


def _decode(kind: type, data: bytes) -> Any:
    try:
        given = json.loads(
            data.decode("utf-8"), parse_int=_int, parse_float=_float, parse_constant=_constant, object_pairs_hook=_pairs
        )
        _count(given)
        json.dumps(given, ensure_ascii=False).encode()  # JSON can name halves of characters, which nobody can write
        return read(kind, given, "body")
    except (ValueError, TypeError, RecursionError) as error:  # TypeError: a list where a word should be
        raise Refused(400, f"the body is not JSON as it should be: {error}") from None


def _count(given: Any) -> None:
    """Before anything is made of it."""
    left, open_ = VALUES, [given]
    while open_:
        value = open_.pop()
        if isinstance(value, list | dict):
            if len(value) > MOST_REPORTS:
                raise Refused(422, f"the body has {len(value)} of a kind; {MOST_REPORTS} reports are the most")
            left -= len(value)
            if left < 0:
                raise Refused(422, f"the body has more than {VALUES} values")
            open_.extend(value.values() if isinstance(value, dict) else value)


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


def _pairs(pairs: list[tuple[str, Any]]) -> Json:  # of a body before its type is read
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
        reason = "there is no such endpoint here" if error.status_code == 404 else error.detail
        return _Json(RefusalBody(reason=reason), error.status_code, headers=error.headers)
    return _Json(RefusalBody(reason=f"ours: {type(error).__name__}; please report it"), 500)
