"""Serve a page of one or several runs on this machine: finished, going on, or simulated. It reads their folders and
changes nothing in them. Open the address that it prints; it has a key in it, so that nobody else on this machine can.

A served run or federation has such a page of its own, at its own address, for everybody with a credential.
"""

from __future__ import annotations

import argparse
import hmac
import os
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fedqueue.cli import common, extras
from fedqueue.errors import ConfigError, FedQueueError, RunFolderError
from fedqueue.ledger import FILE

if TYPE_CHECKING:
    from fedqueue.page.pages import Pages

HELP = "a live page of runs, in a browser"

PORT: Final = 8450
KEY_FILE: Final = "page-key"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", type=Path, nargs="+", metavar="RUN", help="run folders, or folders that hold some")
    parser.add_argument(
        "--port", type=int, default=PORT, metavar="N", help=f"where to listen, on 127.0.0.1 (default: {PORT}; 0: any)"
    )


def run(args: argparse.Namespace) -> int:
    extras.need("serve")
    if not 0 <= args.port <= 65535:
        raise ConfigError(f"--port: must be 0 to 65535, found {args.port}")
    folders = _runs_in(args.folders)
    from fedqueue.config import ServerSettings
    from fedqueue.coordinator.server import answering, listen
    from fedqueue.page.pages import Pages, Source

    sources = _sources(folders, Source)
    key, limits = _key(), ServerSettings(host="127.0.0.1", port=args.port)
    try:
        listener = listen(limits)
    except ConfigError as error:
        raise ConfigError(str(error).replace("server.port", "--port")) from None
    pages = Pages(lambda: sources, title=", ".join(source.name for source in sources[:4]))
    with common.until_interrupted() as interrupted, answering(limits, application(pages, key), listener, None):
        print(f"open http://127.0.0.1:{listener.getsockname()[1]}/#key={key}", flush=True)
        while not interrupted():
            time.sleep(0.2)
    listener.close()
    pages.close()
    return 0


def _runs_in(folders: list[Path]) -> list[Path]:
    found: list[Path] = []
    for folder in folders:
        inside = [folder] if (folder / FILE).exists() else sorted(p.parent for p in folder.rglob(FILE))
        if not inside:
            raise RunFolderError(f"{folder}: is not a run folder, and holds none")
        found += inside
    return list(dict.fromkeys(path.absolute() for path in found))


def _sources(folders: list[Path], make: Any) -> list[Any]:
    names = [folder.name for folder in folders]
    return [
        make(id=str(n), name=folder.name if names.count(folder.name) == 1 else str(folder), folder=folder)
        for n, folder in enumerate(folders)
    ]


def _key() -> str:
    """The same each time, so that a page that is open goes on when we are started again."""
    from fedqueue.files import only_mine, write_secret

    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "fedqueue"
    path = state / KEY_FILE
    try:
        only_mine(path)
        key = path.read_text(encoding="utf-8").strip()
        if len(key) >= 32:
            return key
    except FileNotFoundError:
        pass
    key = secrets.token_urlsafe(32)
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_secret(path, key)
    return key


def application(pages: Pages, key: str) -> Any:
    """What is served: the page's files to everybody, what it tells to who has the key."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    from fedqueue.page.pages import HEADERS

    def refused(reason: str, status: int) -> Response:
        return JSONResponse({"reason": reason}, status, headers=HEADERS)

    async def serve(request: Request) -> Response:
        said, path = request.headers.get("authorization", ""), request.path_params
        try:
            if "file" in path or request.url.path == "/":
                return pages.file(path.get("file", ""))
            if not hmac.compare_digest(said.encode(), f"Bearer {key}".encode()):
                return refused("who asks? open the address that `fedqueue page` prints, with its key", 401)
            if "run" not in path:
                return pages.runs({"may": []})
            which, what, query = path["run"], path.get("what", "models"), request.query_params
            if what == "state" and "text/event-stream" in request.headers.get("accept", ""):
                return pages.stream(which, [], request.headers.get("last-event-id", ""))
            match what:
                case "state":
                    return await pages.state(which)
                case "timeline":
                    return await pages.timeline(which, query)
                case "charts":
                    return await pages.charts(which)
                case "log":
                    return await pages.log(which, query)
                case "ledger":
                    return await pages.ledger(which)
                case "report":
                    return await pages.report(which)
                case "models":
                    return await (pages.model(which, path["version"]) if "version" in path else pages.models(which))
            return refused("there is no such thing", 404)
        except ConfigError as error:
            return refused(str(error), 422)
        except FedQueueError as error:
            return refused(str(error), 404)

    routes = ["/", "/page/{file}", "/v1/page", "/v1/page/{run}/models/{version}", "/v1/page/{run}/{what}"]
    app = Starlette(routes=[Route(path, serve, methods=["GET"]) for path in routes])
    app.router.redirect_slashes = False
    return app
