"""What crosses a process border: one type each, the same JSON as before, and the protocol before still spoken."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fedqueue
from fedqueue import PROTOCOL
from fedqueue.agent.journal import FILE as JOURNAL
from fedqueue.agent.journal import KEPT_UNSCORED, Closed, Notes, NotScored, RunOver, Scoring, SiteJob
from fedqueue.coordinator.older_protocol import in_older_words
from fedqueue.errors import ConfigError, StorageError
from fedqueue.protocol.codec import body, encode, inline, later, message, read
from fedqueue.protocol.contract import (
    Answer,
    Assignment,
    JobOrder,
    ModelFile,
    Order,
    OrderFile,
    PostedWork,
    Receipt,
    Standing,
    StandingFile,
)
from fedqueue.protocol.messages import JobEnded, Share, SubmitJob, UpdateArrived, UpdateRejected, parse
from fedqueue.protocol.reports import Ended, Started
from tests.coordinators import Served, refusal, serving, update
from tests.jobs import make_job, standing_of

ORDER = Order(job_id="north/3", facility="north", round=2, wall_seconds=60.0, after="north/2")
JOB = JobOrder(
    order=ORDER,
    assignment=Assignment(base_version=1, steps=10, learning_rate=0.1),
    model=ModelFile(version=1, sha256="a" * 64),
)


# The codec --------------------------------------------------------------------------------------------------------


@message
class Inner:
    first: int
    second: str = ""


@message
class Outer:
    inner: Inner = inline()
    third: float
    fourth: int = later(default=0)


@message
class Outermost:
    outer: Outer = inline()
    fifth: str


def test_a_part_stands_among_the_fields_of_the_whole_and_a_later_field_only_where_it_says_something() -> None:
    plain, more = Outer(inner=Inner(first=1), third=2.0), Outer(inner=Inner(first=1, second="b"), third=2.0, fourth=3)
    assert json.loads(encode(plain)) == {"first": 1, "second": "", "third": 2.0}
    assert json.loads(encode(more)) == {"first": 1, "second": "b", "third": 2.0, "fourth": 3}
    for outer in (plain, more):
        assert read(Outer, json.loads(encode(outer)), "") == outer
        most = Outermost(outer=outer, fifth="e")
        assert json.loads(encode(most)) == {**json.loads(encode(outer)), "fifth": "e"}
        assert read(Outermost, json.loads(encode(most)), "") == most


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"first": None}, "x.first: must be a whole number"),
        ({"inner": {"first": 1}}, "x.inner: unknown key"),
        ({"fifth": 1}, "x.fifth: unknown key"),
        ({"third": float("nan")}, "x.third: must be a finite number"),
        ({"third": 10**400}, "x.third: must be a number"),
    ],
)
def test_what_does_not_fit_is_named_by_its_key(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read(Outer, {"first": 1, "third": 2.0, **change}, "x")
    with pytest.raises(ConfigError, match=r"x\.first: is missing"):
        read(Outer, {"third": 2.0}, "x")


@pytest.mark.parametrize(
    "made",
    [
        UpdateArrived(
            at=1.0,
            receipt=Receipt(
                job_id="a/0", attempt=0, base_version=0, steps_done=1, train_seconds=1.0, admission_delay=0.0, part=2
            ),
        ),
        UpdateRejected(at=1.0, job_id="a/0", attempt=0, reason="why", part=2),
        JobEnded(at=1.0, job_id="a/0", attempt=0, steps_done=1, train_seconds=1.0, parts=3),
    ],
)
def test_the_part_of_an_update_is_in_the_ledger_where_a_job_hands_in_several(made: Any) -> None:
    assert ('"parts":3' if isinstance(made, JobEnded) else '"part":2') in encode(made)
    assert parse(type(made).__name__, json.loads(encode(made))) == made
    assert "part" not in encode(Share(job_id="a/0", attempt=0, weight=1.0))


# The files of jobs ------------------------------------------------------------------------------------------------


def test_files_of_jobs_are_read_as_the_version_before_wrote_them(tmp_path: Path) -> None:
    model = tmp_path / "m"
    folder = Path(make_job(tmp_path, model, name="fq-1", protocol=PROTOCOL - 1)["FEDQUEUE_JOB"])
    order = read(OrderFile, json.loads((folder / "order.json").read_text()), "order.json")
    assert (order.order.job_id, order.order.wall_seconds, order.model) == ("north/3", 120.0, str(model))
    assert order.assignment == Assignment(base_version=3, steps=3, learning_rate=0.01)
    standing = read(StandingFile, standing_of(model), "standing.json")
    assert (standing.number, standing.standing.version, standing.model) == (7, 3, str(model))


# The journal ------------------------------------------------------------------------------------------------------


def test_an_agent_remembers_the_same_from_its_lines_and_from_their_sum(tmp_path: Path) -> None:
    with closing(Notes(tmp_path)) as notes:
        work = SiteJob(name="fq-3", job=JOB, ordered_at=1.0)
        notes.note(work)
        notes.note(SiteJob(name="fq-4", job=JobOrder(order=replace(ORDER, job_id="north/4")), ordered_at=2.0))
        notes.note(notes.report(Started, sequence=3, attempt=1, admission_delay=2.5, ago=0.0, took_work_at=9.0))
        done = {"steps_done": 1, "train_seconds": 1.0, "held_seconds": 1.0}
        notes.note(notes.report(Ended, sequence=3, attempt=1, **done), Closed(sequence=4, node_seconds=7.0))
        notes.note(Scoring(model=JOB.model or pytest.fail("it has one"), tries=1, job="12"), RunOver(reason="done"))
        for version in range(KEPT_UNSCORED + 2):
            notes.note(NotScored(version=version, reason="no"))
        assert (work.started, work.ended, work.admission_delay) == (1, 1, 2.5), "who holds it sees it"
        remembered = notes.memory
        line = encode(remembered)
    with closing(Notes(tmp_path)) as again:
        assert again.memory == remembered
    (tmp_path / JOURNAL).write_text(line + "\n")
    with closing(Notes(tmp_path)) as summed:
        assert summed.memory == remembered
        assert summed.memory.works[3].job == JOB


def test_a_journal_of_another_version_is_named_with_what_to_do(tmp_path: Path) -> None:
    before = {"kind": "order", "sequence": 0, "at": 1.0, "order": {"name": "fq-0", "wall_seconds": 5.0}}
    (tmp_path / JOURNAL).write_text(f'{{"kind":"journal","id":"{"a" * 16}"}}\n{json.dumps(before)}\n')
    with pytest.raises(StorageError, match=r"line 2 is of another version, which can go on with it .*put back"):
        Notes(tmp_path)


# The wire ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("contract"), strategy="fedqueue") as found:
        yield found


def test_an_agent_of_the_protocol_before_is_answered_in_its_words(served: Served) -> None:
    """Its reader takes these keys and no other."""
    north = served.facility("north")
    north.poll()
    said = {"journal": north.journal, "session": north.session, "generation": 1, "poll_seconds": 5.0}
    headers = {"Content-Type": "application/json", "FedQueue-Protocol": str(PROTOCOL - 1)}
    (now,) = north.poll()["orders"]
    answer = north.client._ask("POST", "/v1/poll", headers, json.dumps(said))
    assert set(answer) == {"received", "orders", "cancel", "standing", "evaluate", "over"}
    (order,) = answer["orders"]
    assert set(order) == {"sequence", "round", "wall_seconds", "purpose", "after", "assignment", "model"}
    assert now["job_id"] == f"north/{order['sequence']}"
    assert set(order["assignment"]) == {"base_version", "steps", "learning_rate", "train_budget"}
    assert set(order["model"]) == {"version", "sha256"}


def test_chains_and_standing_work_in_the_words_of_the_protocol_before() -> None:
    fields = {"next_cutoff": -2.5, "round_length": 10.0, "steps_per_second": 4.0, "overhead": 1.0, "min_steps": 1}
    standing = Standing(version=1, learning_rate=0.1, **fields)  # type: ignore[arg-type]
    posted = PostedWork(number=7, model=ModelFile(version=1, sha256="a" * 64), standing=standing)
    older = json.loads(encode(in_older_words(Answer(received=0, orders=[JOB], cancel=[], standing=posted))))
    assert (older["orders"][0]["sequence"], older["orders"][0]["after"]) == (3, 2)
    assert older["standing"].pop("next_cutoff_in") == -2.5
    assert set(older["standing"]) == {*body(standing), "number", "model"} - {"next_cutoff"}


def test_a_poll_for_another_run_is_refused_in_one_line(served: Served, tmp_path: Path) -> None:
    north = served.facility("north")
    run = served.operator().call("POST", "/v1/facilities/south/invite")["run"]
    assert north.poll(run=run)["run"] == run
    refused = refusal(north.poll, run="another")
    assert refused.status == 409
    assert refused.reason == f"this is run {run}, not 'another'; enrol this facility with it, in another home"
    assert "run" not in north.poll(), "who does not name it need not know of it"
    order = north.running()
    path = north.put(order, update(tmp_path))
    assert refusal(north.commit, path, 0, run="another").status == 409
    assert refusal(north.commit, path, 0, part=1).reason == "part must be 0, as the path says, found 1"
    job, _, digest = path.rpartition("/")
    assert refusal(north.commit, f"{job}/part-1/{digest}", 0, part=1).reason == f"job {order.sequence} has no part 1"
    assert north.commit(path, 0, run=run) == {"status": "accepted", "reason": None, "run": run}


def test_what_has_no_type_is_counted() -> None:
    """A message held as a dict, or an order asked by a key, would be a second contract."""
    source = Path(fedqueue.__file__).parent
    untyped, by_key = [], []
    for room in ("coordinator", "agent", "worker"):
        for path in sorted((source / room).rglob("*.py")):
            for number, line in enumerate(path.read_text().splitlines(), 1):
                where = f"{path.relative_to(source)}:{number}: {line.strip()}"
                if re.search(r"dict\[str, Any\]|\bJson\b", line) and "import" not in line:
                    untyped.append(where)
                if re.search(r"\b(order|work|assignment|standing|answer|verdict|report|handin)\[[\"']", line):
                    by_key.append(where)
    assert len(untyped) < 12, "\n".join(untyped)
    assert not by_key, "\n".join(by_key)


def test_what_an_operator_hears_is_of_one_type(tmp_path: Path) -> None:
    with serving(tmp_path, ["north", "south"], strategy="fedqueue") as served:
        served.facility("north").poll()
        operator = served.operator()
        found = operator.status()
        north, south = found.facilities
        assert json.loads(json.dumps(found, default=body)).keys() == operator.call("GET", "/v1/status").keys()
        assert north.idle_because is None
        assert [(job.job, job.state) for job in north.open_jobs] == [("north/0", "ordered")]
        assert south.idle_because == "it is not enrolled: `fedqueue invite` makes an invitation"
        assert (operator.steer("pause").done, operator.status().state) == ("pause", "paused")
        assert operator.tell("north", "revoke").had is True
        assert operator.tell("south", "revoke").had is False
        assert refusal(operator.tell, "south", "rest").answer.reason == "there is no such endpoint here"


def test_an_order_has_three_shapes() -> None:
    """Its type, which goes from the strategy to the job; JSON on the wire, noted so in journals; and JSON on disk, in
    the ledger and in order.json. In all JSON its fields have the same names and values."""
    source, fields = Path(fedqueue.__file__).parent, {field.name for field in dataclasses.fields(Order)}
    alike = []
    for path in sorted(source.rglob("*.py")):
        for part in ast.walk(ast.parse(path.read_text())):
            if isinstance(part, ast.ClassDef):
                names = {ast.unparse(line.target) for line in part.body if isinstance(line, ast.AnnAssign)}
                if len(names & fields) >= 4:
                    alike.append(f"{path.relative_to(source)}:{part.name}")
    assert alike == ["coordinator/older_protocol.py:OldOrder", "protocol/contract.py:Order"]
    written = body(JOB.order).items()
    assert written <= body(JOB).items()
    on_disk = OrderFile(protocol=PROTOCOL, standing="s", state_dir="d", order=JOB.order)
    assert written <= body(on_disk).items()
    assert json.loads(encode(SubmitJob(order=JOB.order)))["order"].items() == written


def test_agents_know_no_http_but_in_one_file() -> None:
    """Other carriers can follow: whoever holds a credential needs a client, and nobody else names what HTTP has."""
    agent = Path(fedqueue.__file__).parent / "agent"
    words = re.compile(r"/v1/|urllib|HttpRefusedError|\bHTTP\b|\.status (?:[!=<>]=?|in) \(?\d|\b[45]\d\d\b")
    found = {
        path.relative_to(agent).as_posix()
        for path in agent.rglob("*.py")
        if any(words.search(line) for line in path.read_text().splitlines())
    }
    assert found == {"http_transport.py"}
    importing = {path.name for path in agent.rglob("*.py") if "agent.http_transport" in path.read_text()}
    assert importing == {"enrolment.py", "access_file.py"}
