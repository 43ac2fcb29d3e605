"""The live page at the address of a run or a federation, and figures for Prometheus. To ask needs the right to look,
unless the operator has opened reading to everybody; what the page has done goes through the endpoints for that."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol

from starlette.responses import Response

from fedqueue.coordinator.access import Access
from fedqueue.coordinator.coordinator import Coordinator, Refused
from fedqueue.coordinator.endpoints import Call, Endpoint
from fedqueue.coordinator.prometheus import Measured, exposition, measured
from fedqueue.coordinator.rights import RIGHTS
from fedqueue.coordinator.status import status
from fedqueue.errors import ConfigError, FedQueueError
from fedqueue.page.pages import Pages
from fedqueue.protocol.service import RunStatus


class HasPages(Protocol):
    """A service with a page. `pages` None: another has it."""

    access: Access
    pages: Pages | None

    async def overview(self, who: str) -> Mapping[str, Any]:
        """What it is told beside the runs, such as sites."""

    def at_work(self) -> Sequence[Coordinator]:
        """Of the runs here."""


def status_of(coordinator: Coordinator, access: Access) -> Callable[[], Awaitable[RunStatus]]:
    """Asks a coordinator how its run gets on."""
    return lambda: asyncio.wrap_future(coordinator.ask(lambda: status(coordinator, access)))


def _pages(api: HasPages) -> Pages:
    if api.pages is None:
        raise Refused(404, "the page is at the address of the federation")
    return api.pages


def _may(api: HasPages, call: Call, run: str) -> Sequence[str]:
    role = api.access.role_of(call.who) if call.who else None
    extent = None if role is None else RIGHTS[role].get("steer")
    owns = extent == "own" and _pages(api).source(run).owner == call.who
    return ["steer"] if extent == "all" or owns else []


Tell = Callable[[Pages, Call, Sequence[str]], Awaitable[Response]]
"""Of the pages, to who calls and may do this."""


def _telling(what: Tell) -> Callable[[Any, Call], Awaitable[Response]]:
    async def tell(api: HasPages, call: Call) -> Response:
        pages = _pages(api)
        try:
            return await what(pages, call, _may(api, call, call.path["run"]) if "run" in call.path else [])
        except (ConfigError, Refused):
            raise  # it is said so as it is
        except FedQueueError as error:
            raise Refused(404, str(error)) from None

    return tell


async def _file(pages: Pages, call: Call, _: Sequence[str]) -> Response:
    return pages.file(call.path.get("file", ""))


async def _runs(api: HasPages, call: Call) -> Response:
    return _pages(api).runs(await api.overview(call.who))


async def _metrics(api: HasPages, call: Call) -> Response:
    _pages(api)
    asked = [asyncio.wrap_future(one.ask(partial(measured, one, api.access))) for one in api.at_work()]
    found = await asyncio.gather(*asked, return_exceptions=True)  # a run that cannot answer now has no figures now
    try:
        text = exposition([one for one in found if isinstance(one, Measured)])
    except ModuleNotFoundError:
        raise Refused(404, "this server lacks prometheus-client: pip install 'fedqueue[metrics]'") from None
    return Response(text, media_type="text/plain; version=1.0.0; charset=utf-8")


async def _state(pages: Pages, call: Call, may: Sequence[str]) -> Response:
    run, headers = call.path["run"], call.request.headers
    if "text/event-stream" in headers.get("accept", ""):
        return pages.stream(run, may, headers.get("last-event-id", ""))
    return await pages.state(run, may)


async def _timeline(pages: Pages, call: Call, _: Sequence[str]) -> Response:
    return await pages.timeline(call.path["run"], call.request.query_params)


async def _charts(pages: Pages, call: Call, _: Sequence[str]) -> Response:
    return await pages.charts(call.path["run"])


async def _log(pages: Pages, call: Call, _: Sequence[str]) -> Response:
    return await pages.log(call.path["run"], call.request.query_params)


async def _ledger(pages: Pages, call: Call, _: Sequence[str]) -> Response:
    return await pages.ledger(call.path["run"])


async def _report(pages: Pages, call: Call, _: Sequence[str]) -> Response:
    return await pages.report(call.path["run"])


async def _models(pages: Pages, call: Call, _: Sequence[str]) -> Response:
    if "version" in call.path:
        return await pages.model(call.path["run"], str(call.path["version"]))
    return await pages.models(call.path["run"])


def _row(path: str, what: Tell, about: str, *, public: bool = False) -> Endpoint:
    return Endpoint(method="GET", path=path, right="look", handle=_telling(what), about=about, public=public)


RUN: Final = "/v1/page/{run}"

PAGE: Final = (
    Endpoint(method="GET", path="/", right=None, handle=_telling(_file), about="the live page"),
    Endpoint(method="GET", path="/page/{file}", right=None, handle=_telling(_file), about="a file of it"),
    Endpoint(method="GET", path="/v1/page", right="look", handle=_runs, about="runs that have a page", public=True),
    Endpoint(method="GET", path="/metrics", right="look", handle=_metrics, about="for Prometheus", public=True),
    _row(f"{RUN}/state", _state, "a run as it is now; always, as server-sent events", public=True),
    _row(f"{RUN}/timeline", _timeline, "what facilities did: since and until, in seconds", public=True),
    _row(f"{RUN}/charts", _charts, "the curves of a run", public=True),
    _row(f"{RUN}/log", _log, "events: before a number, of a group, of a facility, with a text", public=True),
    _row(f"{RUN}/ledger", _ledger, "all events, in lines of JSON"),
    _row(f"{RUN}/report", _report, "its report, if one was made"),
    _row(f"{RUN}/models", _models, "models that are kept"),
    _row(f"{RUN}/models/{{version}}", _models, "one of them"),
)
