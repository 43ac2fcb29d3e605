"""The live page in a real browser: of finished and simulated runs, of a run that goes on, and under attack."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from playwright.sync_api import Browser

from fedqueue.agent.access_file import AccessFile
from fedqueue.cli import main
from fedqueue.coordinator.access import OPERATOR_FILE
from fedqueue.coordinator.server import ADDRESS
from fedqueue.ledger import FILE, Ledger, LedgerReader
from fedqueue.page.pages import STATIC
from fedqueue.protocol.messages import JobFailed, JobRequeued, JobSubmitted, UpdateRejected, parse
from fedqueue.sim.runner import simulate
from tests.browser import PHONE, chromium, tab
from tests.conftest import config_of, facility
from tests.coordinators import serving
from tests.faults.federation import SERVER
from tests.faults.federation import Served as Federation
from tests.faults.harness import free_port
from tests.slurm import clusters
from tests.slurm_runs import SlurmRun
from tests.waiting import LONGEST, wait_for

pytestmark = pytest.mark.waits(25)

NASTY = "<img src=x onerror=alert(1)><script>alert(2)</script><b id=evil>'\"`&lt;\u202e</b>"
UPLOT = {
    "uplot.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uplot.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
"""Of uPlot 1.6.32, dist/uPlot.iife.min.js and dist/uPlot.min.css, as npm has them."""

FAULTS = (
    {"kind": "fail", "facility": "east", "probability": 0.2},
    {"kind": "preempt", "facility": "west", "probability": 0.2},
    {"kind": "outage", "facility": "west", "at": 40.0, "seconds": 25.0},
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Simulated runs: one with faults, one where jobs stay, a long one, and one whose ledger is full of markup."""
    base = tmp_path_factory.mktemp("runs")
    many = [facility(f"site-{n:02}", nodes=1 + n % 3) for n in range(12)]
    configs = {
        "faulty": config_of("fedqueue", faults=FAULTS, rounds=20),
        "staying": config_of("jit", rounds=20),
        "long": config_of("fedqueue", facilities=many, rounds=200),
    }
    made = {}
    for name, config in configs.items():
        made[name] = base / name
        made[name].mkdir()
        simulate(config, folder=made[name])
    made["damaged"] = shutil.copytree(made["faulty"], base / "damaged")
    made["nasty"] = base / "nasty"
    made["nasty"].mkdir()
    with LedgerReader(made["faulty"] / FILE) as source:
        meta = {
            **source.meta,
            "config": {**source.meta["config"], "run": {**source.meta["config"]["run"], "name": NASTY}},
        }
        ledger = Ledger(made["nasty"] / FILE, meta, durable=False)
        for event, wanted in source.steps():
            if isinstance(event, JobFailed | JobRequeued | UpdateRejected):
                event = replace(event, reason=f"{NASTY} of {event.job_id}")
            ledger(event, [parse(kind, json.loads(text)) for kind, text in wanted])  # type: ignore[misc]
        ledger.close()
    return made


class PageServer:
    """`fedqueue page`, in a process of its own."""

    def __init__(self, base: Path, *folders: Path) -> None:
        self.port, self.log = free_port(), base / "page.log"
        self._argv = [sys.executable, "-m", "fedqueue", "page", *map(str, folders), "--port", str(self.port)]
        self._env = {**os.environ, "XDG_STATE_HOME": str(base / "state")}
        self.start()

    def start(self) -> None:
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(self._argv, stdout=log, stderr=log, env=self._env)
        wait_for(lambda: "#key=" in self.said(), "the page's address", self.said, every=0.05)
        self.url = self.said().split()[-1]

    def said(self) -> str:
        return self.log.read_text()

    def stop(self, how: int = signal.SIGTERM) -> None:
        self._process.send_signal(how)
        self._process.wait(LONGEST)

    def of(self, number: int) -> str:
        return f"{self.url}&run={number}"


@pytest.fixture(scope="module")
def server(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    made = PageServer(tmp_path_factory.mktemp("page"), *folders.values())
    yield made
    made.stop()


NUMBER = {"faulty": 0, "staying": 1, "long": 2, "damaged": 3, "nasty": 4}


# What it shows -------------------------------------------------------------------------------------------------------


def spans_of(ledger: LedgerReader) -> dict[tuple[str, str], float]:
    """Seconds that each job waited in the queue, and that it held nodes, by the ledger's own views."""
    end = ledger.rows("SELECT max(at) AS at FROM events")[0]["at"]
    found: defaultdict[tuple[str, str], float] = defaultdict(float)
    for job in ledger.rows("SELECT job, submitted_at FROM jobs WHERE submitted_at IS NOT NULL"):
        known = job["submitted_at"]
        for attempt in ledger.rows("SELECT * FROM incarnations WHERE job = ? ORDER BY attempt", job["job"]):
            stopped = end if attempt["stopped_at"] is None else attempt["stopped_at"]
            found[job["job"], "waited"] += attempt["started_at"] - max(attempt["eligible_at"], known)
            found[job["job"], "held"] += stopped - attempt["started_at"]
            known = stopped
    return found


@pytest.mark.parametrize("name", ["faulty", "staying"])
def test_the_timeline_is_what_the_ledger_says(
    name: str, browser: Browser, server: PageServer, folders: dict[str, Path]
) -> None:
    with tab(browser, server.of(NUMBER[name])) as seen, LedgerReader(folders[name] / FILE) as ledger:
        seen.is_ready()
        seen.page.click("#whole")
        seen.true("fedqueue.timeline.data.since === 0 && !fedqueue.timeline.busy")
        data = seen.page.evaluate("fedqueue.timeline.data")
        drawn: defaultdict[tuple[str, str], float] = defaultdict(float)
        marks = []
        for found in data["facilities"].values():
            for job, kind, since, until in found["bars"]:
                held = data["kinds"][kind] in ("training", "lingering")
                waited = data["kinds"][kind] == "waiting"
                drawn[found["jobs"][job], "held" if held else "waited" if waited else "upload"] += until - since
            marks += [(job, data["marks"][kind]) for _, kind, job in found["marks"]]
        stopped = [row["job"] for row in ledger.rows("SELECT job FROM incarnations WHERE stopped_at IS NOT NULL")]
        for (job, what), seconds in spans_of(ledger).items():
            if job in stopped:  # the others end where the run did
                assert drawn[job, what] == pytest.approx(seconds, abs=0.05 * 40), (job, what)
        kinds = {"JobFailed": "failed", "JobRequeued": "requeued"}
        rows = ledger.rows("SELECT job, kind FROM events WHERE kind IN ('JobFailed', 'JobRequeued')")
        deferred = ledger.rows("SELECT job FROM updates WHERE deferred")
        assert sorted(marks) == sorted(
            [*((row["job"], kinds[row["kind"]]) for row in rows), *((row["job"], "deferred") for row in deferred)]
        )
        if name == "faulty":
            assert {"failed", "requeued"} <= {kind for _, kind in marks}
        cutoffs = [row["ready_at"] for row in ledger.rows("SELECT ready_at FROM models ORDER BY ready_at")]
        assert data["cutoffs"] == pytest.approx(cutoffs, abs=0.01)
        # And that is what is on the canvas: in the middle of a bar of training is its colour.
        job, _, since, until = next(
            bar for bar in data["facilities"]["east"]["bars"] if bar[1] == 2 and bar[3] > bar[2] + 2
        )
        colour = seen.page.evaluate(
            """([job, middle]) => new Promise((resolve) => requestAnimationFrame(() => {
                const { timeline } = fedqueue, { lanes } = timeline.data.facilities.east, scale = devicePixelRatio;
                timeline.paint();
                const y = 24 + 17 + 26 * (lanes.get(job) + 0.5) / (Math.max(...lanes.values()) + 1);
                const pen = timeline.canvas.getContext("2d");
                const pixel = pen.getImageData(timeline.x(middle) * scale, y * scale, 1, 1);
                resolve([...pixel.data]);
            }))""",
            [job, (since + until) / 2],
        )
        assert colour == [0x00, 0x72, 0xB2, 0xFF]


def test_a_long_run_is_told_in_summaries(browser: Browser, server: PageServer, folders: dict[str, Path]) -> None:
    """And those of time are what the ledger says."""
    with tab(browser, server.of(NUMBER["long"])) as seen, LedgerReader(folders["long"] / FILE) as ledger:
        seen.is_ready()
        seen.true("document.querySelectorAll('#costs tbody tr').length === 12")
        assert seen.bytes < 300_000, "its files, and all that it was told"
        assert all(url.startswith(f"http://127.0.0.1:{server.port}/") for url in seen.asked)
        seen.page.click("#whole")
        seen.true("fedqueue.timeline.data.buckets > 0")
        data = seen.page.evaluate("fedqueue.timeline.data")
        width = (data["until"] - data["since"]) / data["buckets"]
        drawn = {name: sum(found["shares"][2]) / 100 * width for name, found in data["facilities"].items()}
        told: defaultdict[str, float] = defaultdict(float)
        for row in ledger.rows("SELECT job, stopped_at - started_at AS seconds FROM incarnations WHERE stopped_at"):
            told[row["job"].partition("/")[0]] += row["seconds"]
        assert drawn == pytest.approx(dict(told), rel=0.02)


def test_figures_and_curves_are_what_the_ledger_says(
    browser: Browser, server: PageServer, folders: dict[str, Path]
) -> None:
    with tab(browser, server.of(NUMBER["faulty"])) as seen, LedgerReader(folders["faulty"] / FILE) as ledger:
        seen.is_ready()
        seen.shows("#glance", "20")
        for chart in ("waits", "weights", "agreement"):
            seen.page.click(f"#{chart} summary")
        jobs = ledger.rows(
            "SELECT * FROM jobs WHERE facility = 'east' AND expected_delay AND started_at ORDER BY started_at"
        )
        assert len(seen.rows("#waits details")) == len(jobs)
        weights = ledger.rows(
            "SELECT version, count(*) AS n FROM updates WHERE fate = 'aggregated' GROUP BY 1 ORDER BY 1"
        )
        updates = {row[0]: row[-1] for row in seen.rows("#weights details")}
        assert {str(row["version"]): str(row["n"]) for row in weights}.items() <= updates.items()
        stale = {
            row["version"]: row["most"]
            for row in ledger.rows(
                "SELECT version, max(staleness) AS most FROM updates WHERE fate = 'aggregated' GROUP BY 1"
            )
        }
        shown = {int(row[0]): int(row[2]) for row in seen.rows("#agreement details")}
        assert {version: shown[version] for version in stale} == stale
        lost = {row[0]: row[5] for row in seen.rows("#costs")}
        assert float(lost["east"]) > 0, "jobs of it failed"


def test_the_log_is_filtered_and_searched(browser: Browser, server: PageServer, folders: dict[str, Path]) -> None:
    with tab(browser, server.of(NUMBER["faulty"])) as seen, LedgerReader(folders["faulty"] / FILE) as ledger:
        seen.is_ready()
        failed = [
            row["job"] for row in ledger.rows("SELECT job FROM events WHERE kind = 'JobFailed' ORDER BY seq DESC")
        ]
        seen.page.select_option("#log-group", "trouble")
        seen.page.select_option("#log-facility", "east")
        seen.true("[...document.querySelectorAll('#log tbody tr')].every((row) => row.className === 'bad')")
        assert [row[2] for row in seen.rows("#log") if row[1] == "job failed"] == failed
        seen.page.select_option("#log-group", "")
        seen.page.fill("#log-text", f'"{failed[0]}"')
        wait_for(lambda: {row[2] for row in seen.rows("#log")} == {failed[0]}, "its events alone", every=0.05)
        seen.page.fill("#log-text", "100%_")
        seen.shows("#log-said", "nothing fits")
        seen.page.fill("#log-text", "")
        seen.page.select_option("#log-facility", "")
        seen.shows("#log-said", "100 newest")
        while seen.page.is_visible("#log-more"):
            shown = len(seen.rows("#log"))
            seen.page.click("#log-more")
            seen.true(f"document.querySelectorAll('#log tbody tr').length > {shown}")
        events = ledger.rows("SELECT count(*) AS n FROM events")[0]["n"]
        wanted = "kind = 'StopRun' OR json_extract(body, '$.kind') IN ('suspended', 'rejoined')"
        events += ledger.rows(f"SELECT count(*) AS n FROM commands WHERE {wanted}")[0]["n"]
        assert len(seen.rows("#log")) == events, "each once"


def test_the_ledger_is_downloaded_as_the_journal_prints_it(
    browser: Browser, server: PageServer, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with tab(browser, server.of(NUMBER["faulty"])) as seen:
        seen.shows("#downloads button", "ledger")
        with seen.page.expect_download() as download:
            seen.page.click("#downloads button:has-text('ledger')")
        found = Path(download.value.path()).read_text()
    capsys.readouterr()
    assert main(["journal", str(folders["faulty"])]) == 0
    assert found == capsys.readouterr().out


# For everybody -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["desktop", "phone"])
def test_it_is_accessible_and_fits(where: str, browser: Browser, server: PageServer) -> None:
    """In light and dark, which are switched while it is open."""
    look: dict[str, Any] = {"viewport": PHONE, "has_touch": True} if where == "phone" else {}
    with tab(browser, server.of(NUMBER["faulty"]), **look) as seen:
        seen.is_ready()
        seen.page.click("#timeline-table summary")
        seen.true("document.querySelectorAll('#timeline-table tbody tr').length > 20")
        narrow = seen.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert narrow, "nothing is cut off at the side"
        for scheme, paper in (("dark", "rgb(20, 23, 27)"), ("light", "rgb(255, 255, 255)")):
            seen.page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            seen.true(f"getComputedStyle(document.body).backgroundColor === '{paper}'")
            assert seen.violations() == [], scheme
            seen.keep(f"{where}-{scheme}")


def test_the_timeline_is_moved_by_keys(browser: Browser, server: PageServer) -> None:
    with tab(browser, server.of(NUMBER["faulty"])) as seen:
        seen.is_ready()
        seen.page.focus("#newest")
        seen.page.keyboard.press("Tab")
        assert seen.page.evaluate("document.activeElement.id") == "timeline"
        ranges = []
        for key in ("End", "ArrowLeft", "+", "-", "Home", "ArrowRight"):
            seen.page.keyboard.press(key)
            ranges.append(seen.page.evaluate("[fedqueue.timeline.since, fedqueue.timeline.until]"))
        newest, left, closer, wider, whole, right = ranges
        assert left[0] < newest[0]
        assert closer[1] - closer[0] == pytest.approx(0.7 * (left[1] - left[0]))
        assert wider == pytest.approx(left)
        assert whole[0] <= 0
        assert right[0] > whole[0]
        assert "timeline of 2 facilities" in str(seen.page.get_attribute("#timeline", "aria-label"))
        row = seen.page.evaluate("document.querySelector('#timeline').getBoundingClientRect().toJSON()")
        seen.page.mouse.move(row["x"] + row["width"] / 3, row["y"] + 24 + 17 + 8)
        seen.shows("#timeline-said", "east")


def test_a_ledger_that_cannot_be_read_any_more_is_told_and_mended(
    browser: Browser, server: PageServer, folders: dict[str, Path]
) -> None:
    path = folders["damaged"] / FILE
    whole = path.read_bytes()
    with tab(browser, server.of(NUMBER["damaged"])) as seen:
        seen.is_ready()
        assert not seen.page.is_visible("#wrong")
        path.write_bytes(b"no ledger" * 1000)
        seen.shows("#wrong-list", "the ledger cannot be read: what is below is old")
        assert str(folders["damaged"].parent) not in seen.page.inner_text("#wrong-list")
        path.write_bytes(whole)
        seen.true("document.querySelector('#wrong').hidden")


# Who asks, and attacks -----------------------------------------------------------------------------------------------


def asked(url: str, credential: str | None = None, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    headers = {"Authorization": f"Bearer {credential}"} if credential else {}
    try:
        with urlopen(Request(url, headers=headers, method=method), timeout=LONGEST) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except HTTPError as error:
        return error.code, dict(error.headers), error.read()


def test_nothing_that_a_facility_sends_is_markup(browser: Browser, server: PageServer) -> None:
    with tab(browser, server.of(NUMBER["nasty"])) as seen:
        seen.is_ready()
        seen.page.select_option("#log-group", "trouble")
        seen.shows("#log td", NASTY)
        seen.shows("#title", NASTY)
        for found in ("#evil", "img", "body script", "#log b"):
            assert seen.page.locator(found).count() == 0, found
        assert seen.page.evaluate("document.scripts.length") == 2
    status, headers, _ = asked(f"http://127.0.0.1:{server.port}/")
    policy = headers["content-security-policy"]
    assert status == 200
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    with tab(browser, server.of(NUMBER["nasty"]), complains=True) as seen:
        seen.is_ready()
        seen.page.evaluate(
            """() => { const script = document.createElement("script");
                       try { script.text = "window.evil = 1"; document.body.append(script); } catch { } }"""
        )
        assert seen.page.evaluate("window.evil") is None, "the policy forbids it, whatever gets into the page"
        assert any("Content Security Policy" in text or "Trusted" in text for text in seen.complaints)


def test_the_page_of_this_machine_tells_nothing_without_its_key(server: PageServer) -> None:
    base = f"http://127.0.0.1:{server.port}"
    paths = ["/v1/page", *(f"/v1/page/0/{what}" for what in ("state", "timeline", "charts", "log", "ledger", "report"))]
    for path in [*paths, "/v1/page/0/models", "/v1/page/0/models/0"]:
        assert asked(base + path)[0] == 401, path
        assert asked(base + path, "wrong")[0] == 401, path
    key = server.url.partition("#key=")[2]
    for path in (
        "/page/..%2fpages.py",
        "/page/nothing.js",
        "/v1/page/9/state",
        "/v1/page/0/report",
        "/v1/page/0/models/0",
    ):
        assert asked(base + path, key)[0] == 404, path
    for query in ("timeline?since=x", "timeline?until=-1", "timeline?since=nan", "log?group=x", "log?before=1e99"):
        assert asked(f"{base}/v1/page/0/{query}", key)[0] == 422, query
    assert asked(f"{base}/v1/page", key, "POST")[0] == 405


def test_the_library_is_the_one_that_was_chosen_and_no_file_has_inline_code() -> None:
    static = Path(__file__).parents[1] / "src/fedqueue/page/static"
    assert {name: hashlib.sha256((static / name).read_bytes()).hexdigest() for name in UPLOT} == UPLOT
    assert {path.name for path in static.iterdir()} == {*STATIC, "index.html", "uplot-licence.txt"}
    html = (static / "index.html").read_text()
    assert " style=" not in html
    assert " on" not in html.replace(" on the", "").replace(" once", "").replace(" or ", "")
    ours = [path.read_text() for path in static.glob("*.js") if path.name not in UPLOT]
    assert not [
        word
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "eval(", "document.write")
        for text in ours
        if word in text
    ]


def test_reading_is_open_where_the_operator_says_so_and_nothing_else_is(tmp_path: Path) -> None:
    with serving(tmp_path, plain=True, server={"open_reading": True}) as served:
        run = served.address["run"]
        for what in ("", f"/{run}/state", f"/{run}/timeline", f"/{run}/charts", f"/{run}/log"):
            assert asked(f"{served.url}/v1/page{what}")[0] == 200, what
        assert json.loads(asked(f"{served.url}/v1/page/{run}/state")[2])["steer"] is None
        for what in ("ledger", "report", "models", "models/0"):
            assert asked(f"{served.url}/v1/page/{run}/{what}")[0] == 401, what
        for path in ("/v1/run/pause", "/v1/run/stop", "/v1/facilities/north/drain"):
            assert asked(served.url + path, method="POST")[0] == 401, path
        assert asked(f"{served.url}/v1/page", "wrong")[0] == 401, "who says who asks must be that"


# While a run goes on -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """A server, two sites with real jobs, a run that is over, and one that goes on; a user of each role."""
    with Federation(tmp_path_factory.mktemp("federation")) as made:
        for name, role in (("vic", "viewer"), ("olga", "operator")):
            assert main(["user", str(made.folder), "add", name, "--role", role, "--out", str(made.base / name)]) == 0
        made.submit("short", rounds=1)
        made.submit("night", rounds=100_000)
        made.wait_for_end("short")
        yield made


def address(federation: Federation, user: str = "") -> str:
    key = f"&key={AccessFile.load(federation.base / user).credential}" if user else ""
    return f"http://127.0.0.1:{federation.port}/#run={federation.run_id('night')}{key}"


def model(seen: Any) -> int:
    script = "Object.fromEntries([...document.querySelectorAll('#glance dt')].map((one) => [one.textContent, one]))"
    return int(seen.page.evaluate(f"({script}).model.nextSibling.textContent"))


def test_a_viewer_signs_in_and_sees_a_run_go_on(browser: Browser, federation: Federation) -> None:
    with tab(browser, address(federation), complains=True) as seen:
        seen.shows("#sign-in-why", "shown to who may look")
        seen.keep("sign-in")
        assert seen.violations() == []
        seen.page.set_input_files("#access-file", federation.base / "vic")
        seen.page.click("#sign-in button")
        seen.is_ready()
        seen.shows("#all-runs", "short")
        seen.shows("#sites", "north")
        first = model(seen)
        wait_for(lambda: model(seen) > first + 2, "later models, without any reload", every=0.2)
        seen.true("fedqueue.timeline.frames.length > 3")
        assert not seen.page.is_visible("#steer"), "a viewer steers nothing"
        seen.keep("federation")
        seen.page.click("#all-runs a:has-text('short')")
        seen.shows("#title", "short")
        seen.shows("#state", "over")
        said = [text for text in seen.complaints if "401" not in text]
        assert said == []
    base, credential = (
        f"http://127.0.0.1:{federation.port}/v1/page",
        AccessFile.load(federation.base / "vic").credential,
    )
    for what in (
        "",
        *(f"/{federation.run_id('night')}/{one}" for one in ("state", "charts", "log", "models", "report")),
    ):
        status, _, told = asked(base + what, credential)
        assert status == (404 if what.endswith("report") else 200)
        assert str(federation.base).encode() not in told, "a folder of the server is nothing to who is elsewhere"


def test_an_operator_steers_and_no_other_site_can(browser: Browser, federation: Federation, server: PageServer) -> None:
    with tab(browser, address(federation, "olga")) as seen:
        seen.is_ready()
        assert "key=" not in seen.page.url, "it does not stay in the address"
        seen.page.click("#steer-run button:has-text('pause')")
        seen.shows("#steered", "pause: done")
        seen.shows("#wrong-list", "the run is paused since")
        seen.keep("paused")
        seen.page.click("#steer-run button:has-text('resume')")
        seen.shows("#state", "running")
        seen.page.click("#steer-facilities >> xpath=.. >> summary")
        seen.page.click("#steer-facilities button:has-text('drain north')")
        seen.shows("#facilities", "drained: it gets no new job")
        seen.page.click("#steer-facilities button:has-text('join north')")
        seen.true("!document.querySelector('#facilities').textContent.includes('drained')")
        # Another site, open beside it in the same browser, has nothing done in its name.
        other = seen.context.new_page()
        other.goto(f"http://127.0.0.1:{server.port}/page/page.css")
        base = f"http://127.0.0.1:{federation.port}/runs/{federation.run_id('night')}/v1/run/pause"
        other.evaluate(
            "(url) => fetch(url, {method: 'POST', mode: 'no-cors', credentials: 'include'}).catch(() => 0)", base
        )
        assert asked(base, method="POST")[0] == 401
        status = asked(base.replace("run/pause", "status"), AccessFile.load(federation.base / "vic").credential)
        assert json.loads(status[2])["state"] == "running"


def test_a_page_goes_on_when_its_server_comes_back(browser: Browser, federation: Federation, tmp_path: Path) -> None:
    """The federation's own, after kill -9, and that of `fedqueue page`, which reads the same folder."""
    own = PageServer(tmp_path, federation.run_folder("night"))
    try:
        with (
            tab(browser, address(federation, "vic"), complains=True) as seen,
            tab(browser, own.url, complains=True) as beside,
        ):
            for page in (seen, beside):
                page.is_ready()
                page.shows("#state", "running")
            own.stop(signal.SIGKILL)
            beside.shows("#link", "connection lost")
            federation.kill(SERVER)
            seen.shows("#link", "connection lost")
            own.start()
            beside.shows("#link", "live")
            beside.shows("#wrong-list", "the coordinator is down for")
            beside.keep("coordinator-down")
            federation.start(SERVER)
            seen.shows("#link", "live")
            beside.true("document.querySelector('#wrong').hidden")
            for page in (seen, beside):
                first = model(page)
                wait_for(lambda page=page, first=first: model(page) > first, "later models", every=0.2)  # type: ignore[misc]
    finally:
        own.stop()


def test_a_run_over_slurm_is_seen_as_it_goes(browser: Browser, tmp_path: Path) -> None:
    """Over TLS: its jobs wait behind others' jobs, then they start, then there is a model."""
    with clusters(1) as (cluster,), SlurmRun(tmp_path, dict.fromkeys(("north", "south"), cluster)) as run:
        others = cluster.load(jobs=len(cluster.nodes), seconds=1800.0)
        wait_for(lambda: set(cluster.node_states()) == {"allocated"}, "others' jobs hold the nodes", cluster.log)
        for name in run.sites:
            run.shut(name)
        run.start()
        run.wait(JobSubmitted, "north/0", "south/0")
        at = json.loads((run.folder / ADDRESS).read_text())
        address = f"{at['local']}/#key={(run.folder / OPERATOR_FILE).read_text()}"
        with tab(browser, address, ignore_https_errors=True) as seen:

            def doing() -> list[str]:
                return [row[2] for row in seen.rows("#facilities")]

            run.run_until(lambda: all(now.startswith("in the queue for") for now in doing()), "jobs that wait")
            cluster.call("scancel", *others)
            run.run_until(lambda: all(now.startswith("training for") for now in doing()), "jobs that run")
            for name in run.sites:
                run.open(name)
            run.run_until(lambda: model(seen) >= 1, "a model")
            seen.page.click("#whole")
            run.run_until(lambda: waited(seen).keys() >= {"north/0", "south/0"}, "the timeline")
            with LedgerReader(run.folder / FILE) as ledger:
                spans = spans_of(ledger)
            for job, seconds in waited(seen).items():
                assert seconds == pytest.approx(spans[job, "waited"], abs=0.05), job
            seen.keep("slurm")
        run.run_to_end()


def waited(seen: Any) -> dict[str, float]:
    """For how long the first jobs waited, by the timeline."""
    data = seen.page.evaluate("fedqueue.timeline.data")
    return {
        found["jobs"][job]: until - since
        for found in data["facilities"].values()
        for job, kind, since, until in found.get("bars", [])
        if data["kinds"][kind] == "waiting" and found["jobs"][job].endswith("/0")
    }
