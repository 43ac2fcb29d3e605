"""What a federation answers beside its runs: who enrols, what all runs ask of a site, who submits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, TypeVar

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from fedqueue import PROTOCOL, __version__
from fedqueue.coordinator.access import changed
from fedqueue.coordinator.coordinator import Coordinator, Refused
from fedqueue.coordinator.federation import NAME, Federation, Run
from fedqueue.coordinator.http_api import Call, Endpoint, Service, answer_poll, enrolled, enrolling
from fedqueue.coordinator.server import NOT_NOW
from fedqueue.coordinator.status import in_words
from fedqueue.errors import FedQueueError, RunFolderError, StorageError
from fedqueue.protocol.contract import Invitation, one_line
from fedqueue.protocol.reports import Poll
from fedqueue.protocol.service import (
    Done,
    Enrolled,
    FederationStatus,
    Health,
    Refusal,
    RunAnswer,
    SiteAnswer,
    SitePoll,
    Submission,
    Submitted,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

REFUSALS: Final[dict[int, Refusal]] = {401: "not allowed", 403: "not allowed", 410: "superseded"}


class FederationApi(Service):
    def __init__(self, federation: Federation) -> None:
        super().__init__(federation.access, ENDPOINTS)
        self.federation = federation
        # Whatever changes who may ask, or begins a run, one after the other: each waits for the disk.
        self._changer = ThreadPoolExecutor(1, thread_name_prefix="changer")

    def close(self) -> None:
        self._changer.shutdown(wait=True, cancel_futures=True)
        super().close()

    async def change(self, act: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._changer, act)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """To one of the runs, or to the federation itself."""
        _, _, below = str(scope["path"]).partition("/runs/")
        if not str(scope["path"]).startswith("/runs/"):
            return await self.app(scope, receive, send)
        run_id, slash, rest = below.partition("/")
        run = self.federation.runs.get(run_id)
        if run is None or not slash:
            return await JSONResponse({"reason": "there is no such run"}, 404)(scope, receive, send)
        api = run.api
        if api is None:
            said = (f"the run is over: {run.over}", 410) if run.over is not None else (NOT_NOW, 503)
            return await JSONResponse({"reason": said[0]}, said[1])(scope, receive, send)
        return await api.app({**scope, "path": f"/{rest}", "raw_path": f"/{rest}".encode()}, receive, send)


# Handlers -----------------------------------------------------------------------------------------------


def _alone(api: FederationApi, change: Callable[[str], T], what: str) -> T:
    with api.access.lock:  # runs that hear of a revocation change it too
        return change(what)


async def _health(api: FederationApi, call: Call) -> Health:
    return Health(protocol=PROTOCOL, version=__version__)


async def _enrol(api: FederationApi, call: Call) -> Enrolled:
    found = await api.change(lambda: changed(lambda: _alone(api, api.access.enrol, call.body.token)))
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
    return await asyncio.get_running_loop().run_in_executor(None, api.federation.status, _how_it_gets_on)


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
    try:
        return await api.change(lambda: api.federation.submit(submission))
    except (RunFolderError, StorageError) as error:
        raise Refused(507, f"no run was begun: {error}") from None


async def _facility(api: FederationApi, call: Call) -> Invitation | Done:
    name, word, federation = call.path["facility"], call.path["word"], api.federation
    if not NAME.fullmatch(name):
        raise Refused(422, f"{name[:80]!r} is no name for a facility: letters, digits and . _ - alone")
    if word == "invite":
        text, at = await api.change(lambda: changed(lambda: _alone(api, api.access.invite, name))), federation.address
        return Invitation(url=at.url, token=text, certificate=at.certificate, run="")
    if word in ("revoke", "revoke-and-keep"):
        keep = word != "revoke"
        had = await api.change(lambda: changed(lambda: federation.revoke(name, keep=keep)))
        await asyncio.gather(*(_shut_out(api, run, name, keep) for run in federation.runs.values()))
        return Done(done=word, had=had)
    raise Refused(404, f"a federation invites and revokes facilities; say {word!r} to one of its runs: name its folder")


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
    await api.change(lambda: api.federation.settled(name, run.id))


ENDPOINTS: Final = (
    Endpoint(method="GET", path="/v1/health", who="anyone", handle=_health, about="is it there"),
    enrolling(_enrol),
    Endpoint(method="POST", path="/v1/poll", who="facility", handle=_poll, body=SitePoll, about="of all runs at once"),
    Endpoint(method="GET", path="/v1/federation", who="operator", handle=_status, about="sites and runs"),
    Endpoint(method="POST", path="/v1/runs", who="operator", handle=_submit, body=Submission, about="begin a run"),
    Endpoint(
        method="POST",
        path="/v1/facilities/{facility}/{word}",
        who="operator",
        handle=_facility,
        about="invite, revoke",
    ),
)
