"""What a federation answers beside its runs: who enrols, what all runs ask of a site, who submits."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from fedqueue import PROTOCOL, __version__
from fedqueue.coordinator.access import changed, plain_name
from fedqueue.coordinator.coordinator import Coordinator, Refused
from fedqueue.coordinator.endpoints import Call, Endpoint, address_of
from fedqueue.coordinator.federation import NAME, Federation, Run
from fedqueue.coordinator.http_api import (
    RENEWAL,
    Service,
    answer_poll,
    enrolled,
    enrolling,
    note_enrolment,
    of_facility,
)
from fedqueue.coordinator.openapi import openapi
from fedqueue.coordinator.page_api import PAGE, status_of
from fedqueue.coordinator.run_folder import LOG
from fedqueue.coordinator.server import NOT_NOW
from fedqueue.coordinator.status import in_words
from fedqueue.coordinator.transfers import send_file
from fedqueue.errors import FedQueueError, RunFolderError, StorageError
from fedqueue.models import Models, read_models
from fedqueue.page.pages import Pages, Source
from fedqueue.protocol.codec import body, encode
from fedqueue.protocol.contract import Invitation, one_line
from fedqueue.protocol.reports import Poll
from fedqueue.protocol.service import (
    Done,
    Enrolled,
    FederationStatus,
    Health,
    KeptModel,
    KeptModels,
    Refusal,
    RunAnswer,
    SiteAnswer,
    SitePoll,
    Submission,
    Submitted,
    User,
    UserGiven,
    Users,
    UserWanted,
)

log = logging.getLogger(__name__)

LOG_BYTES: Final = 1 << 20
"""Of a run's log that are sent."""
REFUSALS: Final[dict[int, Refusal]] = {401: "not allowed", 403: "not allowed", 410: "superseded"}


class FederationApi(Service):
    def __init__(self, federation: Federation) -> None:
        super().__init__(federation.access, ENDPOINTS, federation.audit)
        self.federation = federation
        self.open_reading = federation.settings.server.open_reading
        self.pages = Pages(self._shown, title=federation.folder.name)

    def _shown(self) -> list[Source]:
        """Newest last; those that are over are read from their folders."""
        runs = list(self.federation.runs.values())
        return [
            Source(
                id=run.id,
                name=run.name,
                folder=run.folder,
                owner=run.owner,
                steer=f"runs/{run.id}/v1" if run.over is None else None,
                status=status_of(run.api.coordinator, self.access) if run.api is not None else None,
            )
            for run in runs
        ]

    async def overview(self, who: str) -> Mapping[str, Any]:
        found = await asyncio.get_running_loop().run_in_executor(None, self.federation.status, who, _how_it_gets_on)
        runs = [{**body(run), "id": run.run, "folder": ""} for run in found.runs]
        return {"sites": [body(site) for site in found.sites], "runs": runs}

    def at_work(self) -> list[Coordinator]:
        return [run.api.coordinator for run in self.federation.runs.values() if run.api is not None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """To one of the runs, or to the federation itself."""
        _, _, below = str(scope["path"]).partition("/runs/")
        if not str(scope["path"]).startswith("/runs/"):
            return await self.app(scope, receive, send)
        which, slash, rest = below.partition("/")
        run = self.federation.run_of(which) if slash else None
        if run is not None and run.api is not None:
            return await run.api.app({**scope, "path": f"/{rest}", "raw_path": f"/{rest}".encode()}, receive, send)
        try:
            self.must_be_known(Request(scope))
            if run is None:
                raise self.no_such_run(which)
            raise Refused(410, f"the run is over: {run.over}") if run.over is not None else Refused(503, NOT_NOW)
        except Refused as error:
            if error.status == 401:
                await self.note_refusal("refused: a credential", "", address_of(Request(scope)))
            await JSONResponse({"reason": str(error)}, error.status)(scope, receive, send)

    def must_be_known(self, request: Request) -> None:
        """Whoever it is: anybody with a credential may renew it."""
        self.who(request, "renew")

    def no_such_run(self, which: str) -> Refused:
        there = sorted(run.name for run in self.federation.runs.values())
        some = ", ".join(there[:10]) + (f" and {len(there) - 10} more" if len(there) > 10 else "")
        return Refused(404, f"there is no run {which[:80]!r} here; there is {some or 'none'}")

    def run(self, call: Call) -> Run:
        which = call.path["run"]
        run = self.federation.run_of(which)
        if run is None:
            raise self.no_such_run(which)
        return run


# Handlers -----------------------------------------------------------------------------------------------


async def _health(api: FederationApi, call: Call) -> Health:
    return Health(protocol=PROTOCOL, version=__version__)


async def _schema(api: FederationApi, call: Call) -> Response:
    return Response(encode(openapi(ENDPOINTS)), media_type="application/json")


async def _enrol(api: FederationApi, call: Call) -> Enrolled:
    await note_enrolment(api, call)
    found = await api.write(lambda: changed(lambda: api.access.enrol(call.body.token)))
    return enrolled(found, run="")


async def _poll(api: FederationApi, call: Call) -> SiteAnswer:
    said: SitePoll = call.body
    answers = await asyncio.gather(*(_answer(api, call.who, poll) for poll in said.runs))
    over = {run.id: run.over for poll in said.runs if (run := api.federation.runs.get(poll.run)) and run.over}
    return SiteAnswer(runs=api.federation.heard(call.who, said.offers), answers=list(answers), over=over)


async def _answer(api: FederationApi, who: str, poll: Poll) -> RunAnswer:
    """What goes wrong with one run is nothing to the others."""
    run = api.federation.runs.get(poll.run)
    refuse = partial(RunAnswer, run=poll.run)
    if run is None or who not in run.facilities:
        return refuse(reason=f"there is no run {poll.run!r} here that {who} takes part in")
    if run.api is None:
        return refuse(busy=True, reason=NOT_NOW)
    try:
        return RunAnswer(run=poll.run, answer=await answer_poll(run.api, who, poll))
    except Refused as error:
        if error.status >= 500 or error.status == 429:
            return refuse(busy=True, reason=one_line(str(error)))
        why: Refusal = "set back" if error.received is not None else REFUSALS.get(error.status, "refused")
        return refuse(refusal=why, reason=one_line(str(error)))


async def _status(api: FederationApi, call: Call) -> FederationStatus:
    return await asyncio.get_running_loop().run_in_executor(None, api.federation.status, call.who, _how_it_gets_on)


def _how_it_gets_on(run: Run) -> tuple[str, int | None, float | None]:
    api = run.api
    if run.over is not None:
        return f"over: {run.over}", None, None
    if api is None:
        return run.trouble or "starting", None, None
    coordinator = api.coordinator
    try:
        return coordinator.ask(lambda: _at_work(coordinator)).result(timeout=5.0)
    except (FedQueueError, TimeoutError):
        return "does not answer now", None, None


def _at_work(coordinator: Coordinator) -> tuple[str, int | None, float | None]:
    return in_words(coordinator.state), coordinator.state.newest, coordinator.tally.score


async def _submit(api: FederationApi, call: Call) -> Submitted:
    submission: Submission = call.body

    def begins(run: str) -> None:
        api.audit.note("submit", plain_name(call.who), call.address, run=run)

    try:
        return await api.write(lambda: api.federation.submit(submission, call.who, begins))
    except (RunFolderError, StorageError) as error:
        raise Refused(507, f"no run was begun: {error}") from None


def _name(call: Call, of: str) -> str:
    name: str = call.path[of]
    if not NAME.fullmatch(name):
        raise Refused(422, f"{name[:80]!r} is no name for a {of}: letters, digits and . _ - alone")
    return name


async def _invite(api: FederationApi, call: Call) -> Invitation:
    name, at = _name(call, "facility"), api.federation.address
    token = await api.write(lambda: changed(lambda: api.access.invite(name)))
    return Invitation(url=at.url, token=token, certificate=at.certificate, run="")


def _revoking(word: str, *, keep: bool) -> Endpoint:
    async def take_back(api: FederationApi, call: Call) -> Done:
        name, federation = _name(call, "facility"), api.federation
        had = await api.write(lambda: changed(lambda: federation.revoke(name, keep=keep)))
        await asyncio.gather(*(_shut_out(api, run, name, keep) for run in federation.runs.values()))
        return Done(done=word, had=had)

    return of_facility(word, "manage", take_back)


async def _shut_out(api: FederationApi, run: Run, name: str, keep: bool) -> None:
    here = run.api
    if here is None:  # it hears of it when it opens
        return
    if name in run.facilities:
        try:
            await asyncio.wrap_future(here.coordinator.ask(lambda: here.coordinator.shut_out(name, keep=keep)))
        except FedQueueError as error:  # the credential is gone; what follows is done when the run opens again
            log.warning(f"run {run.name} hears later that {name} was revoked: {error}")
            return
        await here.uploads.end_all(name)
    await api.write(lambda: api.federation.settled(name, run.id))


# Runs, seen from elsewhere ------------------------------------------------------------------------------


async def _log(api: FederationApi, call: Call) -> Response:
    """Its end: no more than `LOG_BYTES`, from the beginning of a line."""
    path = api.run(call).folder / LOG

    def read_end() -> bytes:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LOG_BYTES))
            data = file.read(LOG_BYTES)
        return data if size <= LOG_BYTES else b"...\n" + data.partition(b"\n")[2]

    try:
        data = await asyncio.get_running_loop().run_in_executor(api.reader, read_end)
    except OSError:
        data = b""  # it has not said anything yet
    return Response(data, media_type="text/plain; charset=utf-8")


async def _models(api: FederationApi, call: Call) -> KeptModels:
    found = await _read_models(api, api.run(call))
    return KeptModels(
        models=[
            KeptModel(
                version=model.version,
                ready_at=model.ready_at,
                score=model.score,
                best=model == found.best,
                newest=model == found.newest,
                sha256=model.digest,
            )
            for model in found.there
        ]
    )


async def _model(api: FederationApi, call: Call) -> Response:
    """As facilities have it: in one piece or from where it was cut off. Who asks knows its sha256, and compares it."""
    run, version, headers = api.run(call), call.path["version"], call.request.headers
    model = next((one for one in (await _read_models(api, run)).there if one.version == version), None)
    if model is None:
        raise Refused(404, f"model {version} of {run.name} is not kept, or there is none")
    try:
        return send_file(model.file, headers.get("range"), model.digest, headers.get("if-range"))
    except OSError as error:
        raise Refused(503, f"model {version} cannot be sent now: {error.strerror}") from None


async def _read_models(api: FederationApi, run: Run) -> Models:
    try:
        return await asyncio.get_running_loop().run_in_executor(api.reader, read_models, run.folder)
    except FedQueueError as error:
        raise Refused(503, f"the models of {run.name} cannot be read now: {error}") from None


# Users --------------------------------------------------------------------------------------------------


async def _users(api: FederationApi, call: Call) -> Users:
    return Users(users=[User(name=name, role=role) for name, role in sorted(api.access.users.items())])


async def _set_user(api: FederationApi, call: Call) -> UserGiven:
    name, wanted, at = _name(call, "user"), call.body, api.federation.address
    if not wanted.anew and name not in api.access.users:
        raise Refused(404, f"there is no user {name!r} yet: give a file for the credential (--out)")
    before = api.access.users.get(name)
    what = "user added" if before is None else "user changed"
    facts = {"credential": "a new one"} if wanted.anew and before is not None else {}
    await api.note(call, what, user=name, role=wanted.role, **facts)
    credential = await api.write(lambda: changed(lambda: api.access.set_user(name, wanted.role, anew=wanted.anew)))
    return UserGiven(url=at.url, certificate=at.certificate, name=name, role=wanted.role, credential=credential)


async def _remove_user(api: FederationApi, call: Call) -> Done:
    name = _name(call, "user")
    had = await api.write(lambda: changed(lambda: api.access.remove_user(name)))
    return Done(done="remove", had=had)


ENDPOINTS: Final = (
    Endpoint(method="GET", path="/v1/health", right=None, handle=_health, about="is it there"),
    Endpoint(method="GET", path="/v1/openapi.json", right=None, handle=_schema, about="this interface"),
    enrolling(_enrol),
    RENEWAL,
    Endpoint(method="POST", path="/v1/poll", right="train", handle=_poll, body=SitePoll, about="of all runs at once"),
    Endpoint(method="GET", path="/v1/federation", right="look", handle=_status, about="sites and runs"),
    Endpoint(method="POST", path="/v1/runs", right="submit", handle=_submit, body=Submission, about="begin a run"),
    Endpoint(method="GET", path="/v1/runs/{run}/log", right="look", handle=_log, about="the end of its log"),
    Endpoint(method="GET", path="/v1/runs/{run}/models", right="look", handle=_models, about="those that are kept"),
    Endpoint(
        method="GET", path="/v1/runs/{run}/models/{version}", right="look", handle=_model, about="a model, or a part"
    ),
    of_facility("invite", "manage", _invite),
    _revoking("revoke", keep=False),
    _revoking("revoke-and-keep", keep=True),
    Endpoint(method="GET", path="/v1/users", right="manage", handle=_users, about="users and their roles"),
    Endpoint(
        method="POST",
        path="/v1/users/{user}",
        right="manage",
        handle=_set_user,
        body=UserWanted,
        most=4 << 10,
        about="add a user, or change a role",
    ),
    Endpoint(
        method="POST",
        path="/v1/users/{user}/remove",
        right="manage",
        handle=_remove_user,
        about="remove a user",
        noted="user removed",
    ),
    *PAGE,
)
