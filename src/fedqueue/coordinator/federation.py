"""A server that facilities join once, and the runs that it hosts.

Each run is what it is alone: a folder, a ledger, a coordinator with a thread of its own. Its interface is the same too,
below /runs/ID of the federation's address; so what goes wrong with one is nothing to the others. What the federation
adds is in one place for all: who may ask, the address, which site offers what.
"""

from __future__ import annotations

import logging
import re
import shutil
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from fedqueue.config import Config, ServerSettings, parse
from fedqueue.coordinator.access import OPERATOR, OPERATOR_FILE, Access, is_user, plain_name
from fedqueue.coordinator.audit import Audit
from fedqueue.coordinator.coordinator import Coordinator
from fedqueue.coordinator.http_api import Api
from fedqueue.coordinator.learned import write_learned
from fedqueue.coordinator.run_folder import (
    LOG,
    RUNS,
    SETTINGS,
    ensure_ledger,
    has_ledger,
    store_config,
    stored_config,
)
from fedqueue.coordinator.scoring import STORED
from fedqueue.coordinator.serve import alone, go_on
from fedqueue.coordinator.server import ADDRESS, NOT_NOW, address_of, answering, certificate_of, listen
from fedqueue.coordinator.submissions import INPUTS, SubmissionSettings, must_run_nothing, must_stay_inside
from fedqueue.errors import ConfigError, FedQueueError, RunFolderError, StorageError
from fedqueue.files import only_ours, write_json
from fedqueue.ledger import FILE, LedgerReader
from fedqueue.protocol.codec import read
from fedqueue.protocol.contract import Address, one_line
from fedqueue.protocol.messages import Command, Event
from fedqueue.protocol.service import (
    FederationStatus,
    HostedRun,
    Offer,
    RunHere,
    SiteStatus,
    Submission,
    Submitted,
)
from fedqueue.protocol.shares import ShareSettings, share_of
from fedqueue.protocol.state import JobState
from fedqueue.runs import SUMMARY

log = logging.getLogger(__name__)

OF_FEDERATION: Final = frozenset(
    {"host", "port", "names", "certificate", "key", "client_authority", "credential_days", "open_reading"}
)
"""Settings of the server that a run has no say in."""
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
JOIN_SECONDS: Final = 30.0
"""How long the end of the federation waits for its runs: each goes on from its ledger all the same."""


@dataclass(frozen=True, kw_only=True)
class FederationConfig:
    """federation.toml."""

    server: ServerSettings = field(default_factory=ServerSettings)
    submissions: SubmissionSettings = field(default_factory=SubmissionSettings)
    share: list[ShareSettings] = field(default_factory=list)


def settings_of(folder: Path) -> FederationConfig:
    path = folder / SETTINGS
    try:
        return read(FederationConfig, tomllib.loads(path.read_text(encoding="utf-8-sig")), "")
    except FileNotFoundError:
        return FederationConfig()
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


class Follower(Protocol):
    """A view of a run's state."""

    past: bool  # what it is told now happened before this process

    def __call__(self, told: Event | Command, job: JobState | None) -> None: ...


MakeView = Callable[[Config], Follower]


@dataclass
class Seen:
    """A facility, as its agent spoke of itself last."""

    at: float  # monotonic
    offers: list[Offer]


class Run:
    """A run that is hosted: its life is a thread."""

    def __init__(self, federation: Federation, folder: Path) -> None:
        self.folder = folder
        self.name = folder.name
        self.config = stored_config(folder)
        with LedgerReader(folder / FILE) as ledger:
            self.id: str = ledger.meta["run"]
            self.owner: str = ledger.meta.get("owner", OPERATOR)
            self.over: str | None = ledger.meta.get("stopped") if (folder / SUMMARY).exists() else None
        self.api: Api | None = None  # None: it cannot answer now
        self.trouble = ""  # why
        self._federation = federation
        self._view = federation.make_view(self.config)
        self._thread = threading.Thread(target=self._live, name=f"run {self.name}", daemon=True)

    @property
    def facilities(self) -> list[str]:
        return [facility.name for facility in self.config.facility]

    def start(self) -> None:
        if self.over is None:
            self._thread.start()

    def join(self) -> None:
        if self._thread.ident is not None:
            self._thread.join(JOIN_SECONDS)

    def _live(self) -> None:
        with _said_in(self.folder / LOG):
            try:
                with alone(self.folder):
                    summary = go_on(
                        self.config, self.folder, self, views=[self._view], until=self._federation.stopping.is_set
                    )
            except Exception as error:  # whatever it is, it is this run's alone
                self.trouble = f"{type(error).__name__}: {one_line(str(error))}"
                log.error(f"run {self.name} has ended with an error: {self.trouble}")
                return
            if summary is not None:
                self.over = str(summary.get("stopped") or "it is over")
                log.info(f"run {self.name} is over: {self.over}")

    # As `Place`

    @contextmanager
    def open(self, coordinator: Coordinator) -> Iterator[None]:
        federation = self._federation
        federation.settle(coordinator)
        address = federation.address_of(self)
        self.api, self.trouble = (
            Api(coordinator, federation.access, address, federation.audit, hosted=True, owner=self.owner),
            "",
        )
        write_json(self.folder / ADDRESS, address)
        self._view.past = False  # its ledger is read
        try:
            yield
        finally:
            api, self.api = self.api, None
            self.trouble = self.trouble or NOT_NOW
            api.close()

    @contextmanager
    def closed(self, reason: str) -> Iterator[None]:
        self.trouble = reason
        yield


class Federation:
    def __init__(self, folder: Path, settings: FederationConfig, address: Address, make_view: MakeView) -> None:
        self.folder = folder
        self.make_view = make_view
        self.settings = settings
        self.address = address
        self.audit = Audit(folder)
        self.access = Access(folder, settings.server.credential_days)
        self.stopping = threading.Event()
        self.seen: dict[str, Seen] = {}
        self.runs: dict[str, Run] = {}  # by what tells them apart
        self._submitting = threading.Lock()
        self._unsettled: dict[str, set[str]] = {}  # facilities that were revoked -> runs that have not heard of it yet

    def begin(self) -> None:
        """Go on with all runs that are there."""
        for folder in sorted((self.folder / RUNS).iterdir()):
            if (folder / STORED).exists() and not (has_ledger(folder) or (folder / ADDRESS).exists()):
                shutil.rmtree(folder, ignore_errors=True)  # who submitted it never heard that it was begun
            elif (folder / STORED).exists():
                try:
                    run = Run(self, folder)
                except FedQueueError as error:  # the others go on
                    log.error(f"run {folder.name} cannot be gone on with: {error}")
                    continue
                self.runs[run.id] = run
        going = {run.id for run in self.runs.values() if run.over is None}
        self._unsettled = {facility: set(going) for facility in self.access.unsettled}
        for run in self.runs.values():
            run.start()

    def end(self) -> None:
        self.stopping.set()
        for run in self.runs.values():
            run.join()

    def address_of(self, run: Run) -> Address:
        below = f"/runs/{run.id}"
        at = self.address
        return Address(
            url=at.url + below,
            certificate=at.certificate,
            run=run.id,
            local=at.local + below,
            port=at.port,
            ca=at.ca,
            operator=str((self.folder / OPERATOR_FILE).absolute()),
        )

    # Who takes part ------------------------------------------------------------------------------------

    def heard(self, facility: str, offers: Sequence[Offer]) -> list[RunHere]:
        """The runs that it takes part in and that go on."""
        self.seen[facility] = Seen(time.monotonic(), list(offers))
        going = [run for run in self.runs.values() if run.over is None and facility in run.facilities]
        return [self._here(run) for run in going]

    def _here(self, run: Run) -> RunHere:
        owner = plain_name(run.owner)
        share = share_of(self.settings.share, run.name, owner)
        weight = 1.0 if share is None else share.weight
        return RunHere(run=run.id, name=run.name, offer=run.config.worker.offer, owner=owner, weight=weight)

    def revoke(self, facility: str, *, keep: bool) -> bool:
        """Take back its credential, now and for good; its runs hear of it from `shut_out_from`."""
        with self.access.lock:
            had = self.access.revoke(facility, keep=keep)
            if not keep:
                self._unsettled[facility] = {run.id for run in self.runs.values() if run.over is None}
        return had

    def settled(self, facility: str, run: str) -> None:
        """This run has on record that the facility was revoked."""
        with self.access.lock:
            left = self._unsettled.get(facility)
            if left is None:
                return
            left.discard(run)
            if not left:
                del self._unsettled[facility]
                with suppress(StorageError):  # then it is done again by the next server, or ends with an enrolment
                    self.access.settle(facility)

    def settle(self, coordinator: Coordinator) -> None:
        """What a run that was down did not hear of."""
        for facility, runs in list(self._unsettled.items()):
            if coordinator.run_id in runs:
                if facility in coordinator.names:
                    coordinator.shut_out(facility, keep=False)
                self.settled(facility, coordinator.run_id)

    # Runs that come ------------------------------------------------------------------------------------

    def submit(self, submission: Submission, who: str, begins: Callable[[str], object]) -> Submitted:
        """Begin one, and tell `begins` its name before. If anything is wrong with it, nothing is left of it."""
        with self._submitting:
            config, tree, notes = self._wanted(submission, who)
            folder = self._new_folder(config.run.name)
            try:
                store_config(folder, tree, Path(config.folder))
                write_learned(
                    folder, [(r.folder, r.config.worker.offer) for r in self.runs.values()], config.worker.offer
                )
                ensure_ledger(config, folder, owner=who)
                run = Run(self, folder)
                begins(run.name)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            self.runs[run.id] = run
            run.start()
        log.info(f"run {run.name} ({run.id}) was submitted by {plain_name(who)}")
        return Submitted(run=run.id, name=run.name, folder=self._place(run, who), notes=notes)

    def _wanted(self, submission: Submission, who: str) -> tuple[Config, dict[str, Any], list[str]]:
        """Its config without the sites that cannot take part, and what its submitter should know."""
        tree, allowed = dict(submission.config), self.settings.submissions
        server = tree.get("server")
        taken = sorted(OF_FEDERATION & set(server)) if isinstance(server, Mapping) else []
        if taken:
            raise ConfigError(f"server.{taken[0]}: is the federation's to say ({SETTINGS}); leave it out")
        folder = Path(submission.folder)
        if who != OPERATOR:
            if submission.folder:
                raise ConfigError(
                    f"folder: is for who is on the server's machine; here it is the federation's {INPUTS}"
                )
            folder = self.folder / INPUTS
            must_run_nothing(tree, allowed)
        config = parse(tree, where="the config", folder=folder)
        if who != OPERATOR:
            must_stay_inside(config, folder, allowed)
        if not NAME.fullmatch(config.run.name):
            raise ConfigError("run.name: must begin with a letter or digit, and have only those and . _ - in it")
        offer, enrolled, notes, without = config.worker.offer, self.access.enrolled(), [], set()
        for facility in config.facility:
            seen = self.seen.get(facility.name)
            offers = {} if seen is None else {found.name: found for found in seen.offers}
            if facility.name not in enrolled:
                invite = f": fedqueue invite {self.folder} {facility.name}" if who == OPERATOR else ""
                notes.append(f"{facility.name} is not enrolled{invite or '; an operator of the federation invites it'}")
            elif seen is None:
                notes.append(f"{facility.name} has not been heard of since this server started")
            elif offer not in offers:
                notes.append(f"{facility.name} takes no part: it has no offer {offer!r}, only {', '.join(offers)}")
                without.add(facility.name)
            elif not offers[offer].is_for(config.run.name, plain_name(who)):
                notes.append(f"{facility.name} takes no part: its offer {offer!r} is not for this run or this user")
                without.add(facility.name)
        if without:
            tree["facility"] = [one for one in tree["facility"] if one["name"] not in without]
            if not tree["facility"]:
                raise ConfigError(f"worker.offer: no facility has the offer {offer!r}; {'; '.join(notes)}")
            config = parse(tree, where="the config", folder=folder)
        return config, tree, notes

    def _new_folder(self, name: str) -> Path:
        number = 1
        while True:
            folder = self.folder / RUNS / (name if number == 1 else f"{name}-{number}")
            try:
                folder.mkdir(mode=0o700)
                return folder
            except FileExistsError:
                number += 1
            except OSError as error:
                raise RunFolderError(f"{folder}: cannot be made: {error.strerror}") from None

    # How it gets on ------------------------------------------------------------------------------------

    def _place(self, run: Run, who: str) -> str:
        """Its folder; who is not on this machine has no use for what lies above."""
        return str(run.folder if who == OPERATOR else run.folder.relative_to(self.folder))

    def status(self, who: str, ask: Callable[[Run], tuple[str, int | None, float | None]]) -> FederationStatus:
        enrolled = self.access.enrolled()
        names = sorted({*enrolled, *(name for run in self.runs.values() for name in run.facilities)})
        return FederationStatus(
            folder=str(self.folder) if who == OPERATOR else "",
            sites=[self._site(name, name in enrolled) for name in names],
            runs=[
                self._run(run, self._place(run, who), *ask(run))
                for run in sorted(self.runs.values(), key=lambda run: run.name)
            ],
        )

    def _site(self, name: str, enrolled: bool) -> SiteStatus:
        seen = self.seen.get(name)
        return SiteStatus(
            name=name,
            enrolled=enrolled,
            heard_seconds_ago=None if seen is None else round(time.monotonic() - seen.at, 1),
            offers=[] if seen is None else [offer.name for offer in seen.offers],
        )

    @staticmethod
    def _run(run: Run, place: str, state: str, model: int | None, score: float | None) -> HostedRun:
        return HostedRun(
            name=run.name,
            run=run.id,
            folder=place,
            state=state,
            model=model,
            score=score,
            facilities=run.facilities,
            owner=plain_name(run.owner) if is_user(run.owner) else "",
        )

    def run_of(self, which: str) -> Run | None:
        """By what tells runs apart, or by its name."""
        return self.runs.get(which) or next((run for run in self.runs.values() if run.name == which), None)


@contextmanager
def federation(folder: Path, *, plain: bool, make_view: MakeView) -> Iterator[Federation]:
    """Serves it until the block is left; its runs go on from their ledgers when it is served again. `make_view`: of
    somebody who follows a run."""
    from fedqueue.coordinator.federation_api import FederationApi

    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in (RUNS, INPUTS):
        (folder / name).mkdir(mode=0o700, exist_ok=True)
    settings = settings_of(folder)
    only_ours(folder, group="" if settings.server.group_may_write else "server.group_may_write")
    with ExitStack() as stack:
        stack.enter_context(alone(folder))
        listener = listen(settings.server)
        stack.callback(listener.close)
        files = certificate_of(settings.server, folder, folder) if not plain else None
        address = address_of(settings.server, listener, files)
        made = Federation(folder, settings, address, make_view)
        stack.callback(made.audit.close)
        stack.callback(made.end)
        api = FederationApi(made)
        stack.callback(api.close)
        made.begin()
        stack.enter_context(answering(settings.server, api, listener, files))
        write_json(folder / ADDRESS, address)
        yield made


@contextmanager
def _said_in(path: Path) -> Iterator[None]:
    """What this thread logs goes into a file too."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s  %(message)s", "%Y-%m-%d %H:%M:%S"))
    ours = threading.current_thread().ident
    handler.addFilter(lambda record: record.thread == ours)
    fedqueue = logging.getLogger("fedqueue")
    fedqueue.addHandler(handler)
    try:
        yield
    finally:
        fedqueue.removeHandler(handler)
        handler.close()
