"""The coordinator's interface under requests that nobody should send: it refuses them, and the run goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode

from fedqueue.agent.http_transport import HttpRefusedError
from fedqueue.agent.transport import CoordinatorUnreachableError
from fedqueue.coordinator import federation_api
from fedqueue.coordinator.access import MOST_AT_ONCE, REPORTS_IN_STOCK, REPORTS_PER_SECOND, Limits
from fedqueue.coordinator.coordinator import Refused
from fedqueue.coordinator.endpoints import BODY_LIMIT, Endpoint
from fedqueue.coordinator.http_api import ENDPOINTS
from fedqueue.coordinator.openapi import openapi
from fedqueue.coordinator.rights import RIGHTS
from fedqueue.ledger import FILE, LedgerReader
from fedqueue.metrics import Tally
from fedqueue.protocol import reports
from fedqueue.protocol.codec import encode, read
from fedqueue.protocol.contract import JobId, Receipt, job_id, sequence_of
from fedqueue.protocol.messages import ModelReady, RunStarted, TimerFired, UpdateArrived
from fedqueue.protocol.plan import FacilityProfile, Plan
from fedqueue.protocol.state import Outcomes, RunState
from fedqueue.protocol.strategies import STRATEGIES
from fedqueue.protocol.strategies.fedavg import FedAvg
from tests.conftest import STRATEGY_NAMES
from tests.coordinators import Facility, Raw, Served, ended, failed, refusal, request, serving, started
from tests.waiting import LONGEST

EXAMPLES = int(os.environ.get("FEDQUEUE_FUZZ_EXAMPLES", "25"))
"""Of each endpoint, for each who asks and both kinds of data; more of them in a longer search."""

TABLES = {"run": ENDPOINTS, "federation": federation_api.ENDPOINTS}
_OPERATIONS: list[tuple[str, Any]] = [
    (of, found.ok())  # type: ignore[union-attr]  # the document is right: another test says so
    for of, table in TABLES.items()
    for found in schemathesis.openapi.from_dict(openapi(table)).get_all_operations()
]
ENDING = ("POST /v1/run/pause", "POST /v1/run/stop")
"""Words that who may say them is not asked to say at random: others need the run."""
_QUIET = settings(
    max_examples=EXAMPLES,
    database=None,
    deadline=None,
    derandomize=False,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Rounds of a second, so that cutoffs and models come while it is asked nonsense."""
    with serving(tmp_path_factory.mktemp("fuzz"), round_length=1.0) as made:
        made.facility("north").poll()
        yield made
        assert made.replays() > 0


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """With a run, whose facility is enrolled, and a user of each role."""
    base = tmp_path_factory.mktemp("federation")
    made = Served(base / "federation", base / "serve.log")
    made.folder.mkdir(mode=0o700)
    (made.folder / "federation.toml").write_text("[server]\nport = 0\n")
    (made.folder / "federation.toml").chmod(0o600)
    made.start()
    try:
        made.enrol("south")
        run = {"name": "first", "strategy": "fedasync", "rounds": 5}
        more = {"task": {"name": "timing"}, "evaluation": {"where": "nowhere"}, "facility": [{"name": "south"}]}
        made.operator().call("POST", "/v1/runs", {"config": {"run": run, **more}})
        for role in ("submitter", "viewer"):
            given = made.operator().call("POST", f"/v1/users/{role}", {"role": role, "anew": True})
            made.credentials[role] = str(given["credential"])
        yield made
        assert [run.name for run in made.operator().federation().runs] == ["first"]
        assert "ours:" not in made.said(), made.said()[-2000:]
        assert made.stop() == 130
    finally:
        made.stop()


@pytest.fixture(autouse=True)
def unharmed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test asked, the run goes on: a poll is answered, and nothing of ours went wrong."""
    yield
    if "served" not in request.fixturenames:
        return
    served: Served = request.getfixturevalue("served")
    assert "ours:" not in served.said(), served.said()[-2000:]
    assert served.status()["state"] == "running"
    assert served.facility("north").poll()["over"] is None


# By the schema -------------------------------------------------------------------------------------------------------


def _credential(served: Served, who: str) -> str:
    if who == "facility":
        return served.credentials.get("south") or served.enrol("south")
    return served.operator_secret if who == "operator" else served.credentials.get(who, "A" * 43)


_MODES = pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["fits", "misfits"])


@_MODES
@pytest.mark.parametrize("who", ["facility", "operator", "a stranger"])
@pytest.mark.parametrize("operation", [found for of, found in _OPERATIONS if of == "run"], ids=lambda op: op.label)
def test_no_request_by_the_schema_makes_an_error_of_ours(
    operation: Any, mode: GenerationMode, who: str, served: Served
) -> None:
    if who == "operator" and operation.label in ENDING:
        pytest.skip("others need the run")
    _ask_at_random(operation, mode, who, served, ENDPOINTS)


@_MODES
@pytest.mark.parametrize("who", ["operator", "submitter", "a stranger"])
@pytest.mark.parametrize(
    "operation", [found for of, found in _OPERATIONS if of == "federation"], ids=lambda op: op.label
)
def test_no_request_by_the_schema_makes_an_error_of_a_federations(
    operation: Any, mode: GenerationMode, who: str, federation: Served
) -> None:
    _ask_at_random(operation, mode, who, federation, federation_api.ENDPOINTS)


def _ask_at_random(operation: Any, mode: GenerationMode, who: str, served: Served, table: Sequence[Endpoint]) -> None:
    endpoint = next(e for e in table if f"{e.method} {e.path}" == operation.label)
    if mode is GenerationMode.NEGATIVE and not (endpoint.body or "{" in endpoint.path or endpoint.right):
        pytest.skip("it takes nothing that could be wrong")
    credential = _credential(served, who)
    session = requests.Session()

    @seed(20261116)
    @_QUIET
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Case[Any]) -> None:
        headers = {str(name): str(value) for name, value in (case.headers or {}).items()}
        case.headers.clear()
        case.headers.update({"Authorization": f"Bearer {credential}"})
        case.headers.update({name: value for name, value in headers.items() if name.lower() != "authorization"})
        try:
            response = case.call(base_url=served.url, session=session, verify=str(served.certificate), timeout=LONGEST)
        except requests.exceptions.InvalidHeader:
            return  # what no client sends goes through `Raw`
        assert response.status_code < 500, f"{case.method} {case.formatted_path}: {response.content!r}"
        if endpoint.right is not None and who == "a stranger":
            assert response.status_code in (400, 401, 404, 405, 426), response.content
        elif endpoint.right is not None and endpoint.right not in RIGHTS[who]:  # type: ignore[index]
            assert response.status_code in (400, 401, 403, 404, 405, 426), response.content

    ask()
    session.close()


def test_the_document_is_the_table_that_is_served(served: Served) -> None:
    document = served.anyone().call("GET", "/v1/openapi.json")
    assert document == json.loads(json.dumps(openapi(ENDPOINTS)))
    assert {(path, method) for path, found in document["paths"].items() for method in found} == {
        (endpoint.path, endpoint.method.lower()) for endpoint in ENDPOINTS
    }


# As bytes ------------------------------------------------------------------------------------------------------------


def _enrol(body: bytes, *headers: str) -> bytes:
    return request("POST", "/v1/enroll", body, headers=headers)


_BODIES: dict[str, tuple[bytes, set[int]]] = {
    "nothing": (b"", {400}),
    "no JSON": (b"token=1", {400}),
    "not an object": (b'"token"', {422}),
    "NaN": (b'{"token":NaN}', {400}),
    "Infinity": (b'{"token":-Infinity}', {400}),
    "1e400": (b'{"token":1e400}', {400}),
    "a float of a megabyte": (b'{"token":0.' + b"1" * 1_000_000 + b"}", {400, 422}),
    "10**5000": (b'{"token":1' + b"0" * 5000 + b"}", {400}),
    "10**1000000": (b'{"token":1' + b"0" * 1_000_000 + b"}", {400}),
    "nested 500 deep": (b'{"token":' + b"[" * 500 + b"]" * 500 + b"}", {400, 422}),
    "nested 960 deep": (b'{"token":' + b"[" * 960 + b"]" * 960 + b"}", {400, 422}),
    "nested 100000 deep": (b"[" * 100_000, {400}),
    "nested objects": (b'{"a":' * 50_000, {400}),
    "a key twice": (b'{"token":"a","token":"b"}', {400}),
    "half a character": (b'{"token":"\\ud800"}', {400}),
    "half a character as a key": (b'{"\\ud800":"a"}', {400}),
    "bytes that are no UTF-8": (b'{"token":"\xff\xfe"}', {400}),
    "UTF-16": ('{"token":"a"}'.encode("utf-16"), {400}),
    "UTF-32": ('{"token":"a"}'.encode("utf-32-le"), {400}),
    "a byte order mark": (b'\xef\xbb\xbf{"token":"a"}', {400}),
    "a zero byte": (b'{"token":"a\x00"}', {400}),
    "an escaped zero": (b'{"token":"\\u0000"}', {403}),
    "an unknown key": (b'{"token":"a","more":1}', {422}),
    "a very long key": (b'{"' + b"k" * 500_000 + b'":1}', {400}),
    "a very long value": (b'{"token":"' + b"v" * 500_000 + b'"}', {422}),
    "a very long wrong value": (b'{"token":["' + b"v" * 500_000 + b'"]}', {422}),
    "the largest body": (b" " * BODY_LIMIT, {400}),
    "one byte more": (b" " * (BODY_LIMIT + 1), {413}),
}


@pytest.mark.parametrize("name", _BODIES)
def test_a_body_that_is_wrong_is_refused(name: str, served: Served) -> None:
    """Of strangers little is read; what is longer comes from a facility."""
    body, expected = _BODIES[name]
    facility = served.credentials.get("south-1") or served.enrol("south-1")
    long = len(body) > next(e.most for e in ENDPOINTS if e.path == "/v1/enroll")
    with Raw(served) as raw:
        raw.send(request("POST", "/v1/poll", body, credential=facility) if long else _enrol(body))
        answer = raw.answer()
    assert answer is not None
    assert answer[0] in expected, answer
    assert len(json.loads(answer[2])["reason"]) < 400  # it does not send back what it got


_CHUNKED = "Transfer-Encoding: chunked"
_HEADS: dict[str, tuple[bytes, set[int | None]]] = {
    "no request": (b"\x00\x01\x02\r\n\r\n", {400}),
    "TLS in TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64 + b"\r\n\r\n", {400}),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {400, 404}),
    "no Host": (b"GET /v1/health HTTP/1.1\r\n\r\n", {200, 400}),
    "two Hosts": (b"GET /v1/health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", {400}),
    "a name of 1 MB": (b"GET /v1/health HTTP/1.1\r\n" + b"a" * (1 << 20) + b": b\r\n\r\n", {400, None}),
    "a value of 1 MB": (b"GET /v1/health HTTP/1.1\r\nHost: a\r\nA: " + b"a" * (1 << 20) + b"\r\n\r\n", {400, None}),
    "100000 headers": (b"GET /v1/health HTTP/1.1\r\nHost: a\r\n" + b"A: b\r\n" * 100_000 + b"\r\n", {400, None}),
    "a path of 1 MB": (b"GET /" + b"a" * (1 << 20) + b" HTTP/1.1\r\nHost: a\r\n\r\n", {400, None}),
    "a header folded": (b"GET /v1/health HTTP/1.1\r\nHost: a\r\nA: b\r\n c\r\n\r\n", {200, 400}),
    "a space before the colon": (b"GET /v1/health HTTP/1.1\r\nHost : a\r\n\r\n", {400}),
    "a bare line feed": (b"GET /v1/health HTTP/1.1\nHost: a\n\n", {200, 400}),
    "a zero byte in a header": (b"GET /v1/health HTTP/1.1\r\nHost: a\r\nA: \x00\r\n\r\n", {400}),
    "a header injected": (request("GET", "/v1/health%0d%0aSet-Cookie:%20a=b"), {404}),
    "a protocol with a line break": (
        b"GET /v1/health HTTP/1.1\r\nHost: a\r\nFedQueue-Protocol: 1\x0b2\r\n\r\n",
        {400, 426},
    ),
    "another protocol": (request("GET", "/v1/health", headers=["FedQueue-Protocol: 99"]), {426}),
    "letters outside ASCII": ("GET /v1/h\xe9alth HTTP/1.1\r\nHost: a\r\n\r\n".encode("latin-1"), {400, 404}),
    "a method of its own": (request("BREW", "/v1/health"), {405}),
    "TRACE": (request("TRACE", "/v1/health"), {405}),
    "CONNECT": (request("CONNECT", "example.org:443"), {400, 404, 405}),
    "a whole URL": (request("GET", "http://example.org/v1/health"), {200, 404}),
    "a WebSocket": (
        request(
            "GET",
            "/v1/health",
            headers=["Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Key: eA=="],
        ),
        {200, 400},
    ),
    "a slash too many": (request("GET", "/v1/health/"), {404}),
    "a length that is no number": (_enrol(b"{}", "Content-Length: two"), {400}),
    "a negative length": (_enrol(b"{}", "Content-Length: -2"), {400}),
    "a length of other digits": (_enrol(b"{}", "Content-Length: \xb2"), {400}),
    "a length of 5000 digits": (_enrol(b"{}", "Content-Length: " + "9" * 5000), {400, 413}),
    "two lengths": (_enrol(b"{}", "Content-Length: 2", "Content-Length: 3"), {400}),
    "a length and chunks": (_enrol(b"2\r\n{}\r\n0\r\n\r\n", "Content-Length: 2", _CHUNKED), {400, 411}),
    "chunks": (_enrol(b"2\r\n{}\r\n0\r\n\r\n", _CHUNKED), {411}),
    "a chunk of no size": (_enrol(b"zz\r\n{}\r\n0\r\n\r\n", _CHUNKED), {411}),
    "chunks beyond the limit": (_enrol((b"10000\r\n" + b" " * 0x10000 + b"\r\n") * 17, _CHUNKED), {411}),
    "another coding": (_enrol(b"{}", "Transfer-Encoding: gzip"), {400, 501}),
    "another content type": (_enrol(b"<a/>", "Content-Type: application/xml"), {400}),
    "a form": (_enrol(b"token=a", "Content-Type: application/x-www-form-urlencoded"), {400}),
    "no credential": (request("POST", "/v1/poll", b"{}"), {401}),
    "an empty credential": (request("POST", "/v1/poll", b"{}", headers=["Authorization: Bearer "]), {401}),
    "another scheme": (request("POST", "/v1/poll", b"{}", headers=["Authorization: Basic YTpi"]), {401}),
    "a credential outside ASCII": (request("POST", "/v1/poll", headers=["Authorization: Bearer \xff"]), {401}),
}  # fmt: skip


@pytest.mark.parametrize("name", _HEADS)
def test_a_request_that_is_wrong_is_refused(name: str, served: Served) -> None:
    sent, expected = _HEADS[name]
    with Raw(served) as raw:
        try:
            raw.send(sent)
        except OSError:
            assert None in expected  # it was cut off while it still sent
            return
        answer = raw.answer()
    status = None if answer is None else answer[0]
    assert status in expected, answer
    assert answer is None or "set-cookie" not in answer[1]


_ODD = (
    "..", "%2e%2e", "%2e%2e%2f%2e%2e%2fetc%2fpasswd", "..%5c..", "%00", "%", "%zz", "%ff%fe", "-1", "1e3", "0x1", "1.0",
    "NaN", "9" * 16, "9" * 4000, "+1", "%201", "%d9%a1", "%c2%b2", "%0d%0aA:%20b", "*", "[a]", "{version}", "'", ";ls",
    "$(ls)", "`ls`", "|ls", "~",
)  # fmt: skip


@pytest.mark.parametrize("endpoint", [e for e in ENDPOINTS if "{" in e.path], ids=lambda e: f"{e.method} {e.path}")
def test_odd_names_and_numbers_in_a_path_are_refused(endpoint: Any, served: Served) -> None:
    """In every place, with all others right."""
    right = {
        "version": "0",
        "sequence": "0",
        "attempt": "0",
        "sha256": "a" * 64,
        "facility": "north",
        "run": "first",
        "file": "page.css",
    }
    names = [part[1:-1] for part in endpoint.path.split("/") if part.startswith("{")]
    credential = _credential(served, "operator" if endpoint.right in RIGHTS["operator"] else "facility")
    with Raw(served) as raw:
        for name in names:
            for odd in _ODD:
                path = endpoint.path
                for other in names:
                    path = path.replace(f"{{{other}}}", odd if other == name else right[other])
                query = "?offset=0&bytes=8" if endpoint.query else ""
                raw.send(request(endpoint.method, path + query, b"{}", credential=credential))
                assert raw.status() in (400, 404, 405, 422), f"{name}: {odd}"


@pytest.mark.parametrize("value", ["", "-1", "1.5", "9" * 16, "a", "%00", "0x8", "1,2"])
@pytest.mark.parametrize("name", ["offset", "bytes"])
def test_odd_numbers_in_a_query_are_refused(name: str, value: str, served: Served) -> None:
    query = "&".join(f"{key}={value if key == name else 8}" for key in ("offset", "bytes"))
    with Raw(served) as raw:
        path = f"/v1/updates/0/0/{'a' * 64}?{query}"
        raw.send(request("PUT", path, b"12345678", credential=_credential(served, "facility")))
        assert raw.status() == 422


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("bytes=0-0", 206), ("bytes=-5", 206), ("bytes=5-", 206), ("bytes=0-99999999999999999", 206),
        ("bytes=99999999-", 416), ("bytes=-0", 416), ("bytes=999999999999999999-", 416),
        ("bytes=" + "9" * 30 + "-", 200), ("bytes=5-1", 200), ("bytes=-", 200), ("bytes=a-b", 200), ("lines=0-1", 200),
        ("bytes=0-1,3-4", 200), ("bytes=--1", 200), ("", 200), ("bytes=" + "0-1," * 5000, 200),
    ],
)  # fmt: skip
def test_an_odd_range_gets_the_model_or_nothing(header: str, expected: int, served: Served) -> None:
    with Raw(served) as raw:
        credential = _credential(served, "facility")
        newest = served.status()["model"]
        raw.send(request("GET", f"/v1/models/{newest}", credential=credential, headers=[f"Range: {header}"]))
        assert raw.status() == expected


def test_a_body_that_is_cut_short_leaves_nothing(served: Served) -> None:
    sent = _enrol(b'{"token":"' + b"a" * 40, "Content-Length: 100")
    for length in (1, 20, len(sent) - 50, len(sent) - 1, len(sent)):
        with Raw(served) as raw:
            raw.send(sent[:length])
    with Raw(served) as raw:
        raw.send(request("GET", "/v1/health"))
        assert raw.status() == 200


def test_requests_sent_before_the_first_was_answered_are_answered_in_order(served: Served) -> None:
    with Raw(served) as raw:
        raw.send(request("GET", "/v1/health") + request("POST", "/v1/enroll", b"{}") + request("GET", "/v1/nowhere"))
        seen = b""
        while seen.count(b"HTTP/1.1 ") < 3:
            piece = raw._receive()
            assert piece, seen
            seen += piece
    assert [int(part[:3]) for part in seen.split(b"HTTP/1.1 ")[1:]] == [200, 422, 404]


# By what it means ----------------------------------------------------------------------------------------------------


@pytest.fixture
def evil(served: Served) -> Facility:
    """A facility that is in the run, and may have a job."""
    served.operator().call("POST", "/v1/facilities/south/join")
    found = served.facility("south")
    found.poll()
    return found


def _says(act: Callable[[], object]) -> int:
    try:
        act()
    except HttpRefusedError as error:
        return error.status
    return 200


_BOUND = {"standing": 1, "cutoff_index": 0, "base_version": 0, "steps": 10, "learning_rate": 0.1, "train_budget": 1.0}


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        (started(10**9), 422),
        (failed(10**9), 422),
        ({"kind": "submitted", "sequence": 10**15}, 422),
        ({"kind": "submitted", "sequence": -1}, 422),
        ({"kind": "refused", "sequence": 0, "reason": "x" * 501, "transient": True}, 422),
        (failed(0, reason="x" * 100_000), 422),
        (failed(0, attempt=-1), 422),
        (failed(0, attempt=10**6), 422),
        (started(0, ago=-1.0), 422),
        (started(0, bound={**_BOUND, "base_version": 10**6}), 422),
        (started(0, bound={**_BOUND, "steps": 0}), 422),
        (started(0, bound={**_BOUND, "learning_rate": 0.0}), 422),
        (started(0, bound={**_BOUND, "cutoff_index": 10**12}), 422),
        ({"kind": "scored", "version": 0, "metrics": {"score": 1.0}}, 403),
        ({"kind": "scored", "version": 0, "metrics": {}}, 422),
        ({"kind": "scored", "version": 0, "metrics": {"score": "1"}}, 422),
        ({"kind": "scored", "version": 0, "metrics": {f"m{i}": 1.0 for i in range(101)}}, 422),
        ({"kind": "scored", "version": 0, "metrics": {"\x1b[2J": 1.0, "score": 1.0}}, 422),
        ({"kind": "stopped"}, 422),
        ({"kind": ["scored"]}, 422),
        ({"kind": None}, 422),
    ],
)
def test_a_report_of_what_cannot_be_is_refused(report: dict[str, Any], expected: int, evil: Facility) -> None:
    assert _says(lambda: evil.poll(report)) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"poll_seconds": 1e9},
        {"poll_seconds": 0.0},
        {"poll_seconds": -1.0},
        {"generation": -1},
        {"journal": "../../../etc"},
        {"journal": "short"},
        {"session": "x" * 65},
        {"host": "x" * 256},
        {"host": "\x1b]0;mine\x07"},
        {"open": [1] * 1001},
        {"open": [-1.5]},
        {"reports": [{"n": 0, "kind": "submitted", "sequence": 0}]},
        {"reports": [{"n": 2, "kind": "submitted", "sequence": 0}, {"n": 1, "kind": "submitted", "sequence": 0}]},
        {"reports": [{"n": n, "kind": "submitted", "sequence": 0} for n in range(1, 1002)]},
    ],
    ids=lambda changes: f"{next(iter(changes))}-{len(str(changes))}",
)
def test_a_poll_of_what_cannot_be_is_refused(changes: dict[str, Any], evil: Facility) -> None:
    assert _says(lambda: evil.poll(**changes)) == 422


def test_reports_that_leave_some_out_are_refused_with_the_number_to_begin_with(evil: Facility) -> None:
    refused = refusal(evil.poll, reports=[{"n": evil.n + 2, "kind": "submitted", "sequence": 0}])
    assert (refused.status, refused.answer.received) == (409, evil.n)


def test_a_poll_that_comes_twice_counts_once(served: Served, evil: Facility) -> None:
    order = evil.order()
    again = [{"n": evil.n, "kind": "submitted", "sequence": order.sequence}]
    assert [evil.poll(reports=again)["received"] for _ in range(3)] == [evil.n] * 3
    assert len(_told(served, evil)) == 1


def test_what_a_facility_says_is_one_printable_line_in_the_ledger(served: Served, evil: Facility) -> None:
    order = evil.order()
    evil.poll(failed(order.sequence, reason="it fell\n\x1b[2J\u202edown"))
    assert [event["reason"] for event in _told(served, evil)] == ["it fell ?[2J?down"]


def _told(served: Served, facility: Facility) -> list[dict[str, Any]]:
    """What the ledger has of its newest report."""
    with LedgerReader(served.folder / FILE) as ledger:
        origin = f"{facility.name}/{facility.journal}/{facility.n}"
        return [json.loads(row["body"]) for row in ledger.rows("SELECT body FROM events WHERE origin = ?", origin)]


_SECONDS = st.sampled_from([0.0, 1e-9, 0.5, 30.0, 1e6, 1e12])
_STEPS = st.sampled_from([0, 1, 10, 10**6, 2**53])
_ATTEMPTS = st.sampled_from([0, 0, 0, 1, 2, 9_999])
_REASONS = st.sampled_from(["it fell", "wall time exceeded", "x" * 500, "[/bold] %s {0} \u0000"])


def _report(sequence: st.SearchStrategy[int]) -> st.SearchStrategy[dict[str, Any]]:
    """Well-typed, and absurd."""

    def of(kind: str, **facts: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
        return st.fixed_dictionaries({"kind": st.just(kind), "sequence": sequence, **facts})

    bound = st.fixed_dictionaries(
        {
            "standing": st.integers(0, 4),
            "cutoff_index": st.sampled_from([0, 1, 10**6]),
            "base_version": st.integers(0, 3),
            "steps": st.sampled_from([1, 10, 2**53]),
            "learning_rate": st.sampled_from([1e-300, 0.1, 1e12]),
            "train_budget": _SECONDS,
        }
    )
    return st.one_of(
        of("submitted"),
        of("refused", reason=_REASONS, transient=st.booleans()),
        of(
            "started",
            attempt=_ATTEMPTS,
            admission_delay=_SECONDS,
            ago=_SECONDS,
            lingered=_SECONDS,
            bound=st.none() | bound,
        ),
        of("requeued", attempt=_ATTEMPTS, reason=_REASONS, held_seconds=_SECONDS),
        of("ended", attempt=_ATTEMPTS, steps_done=_STEPS, train_seconds=_SECONDS, held_seconds=_SECONDS),
        of("failed", attempt=_ATTEMPTS, reason=_REASONS, transient=st.booleans(), held_seconds=_SECONDS),
    )


def test_no_order_of_absurd_reports_harms_the_run(served: Served) -> None:
    """One facility says anything about its jobs, in any order, and sends updates; another goes on as before."""
    north, south = served.facility("north"), served.facility("south")

    @seed(7)
    @settings(_QUIET, max_examples=EXAMPLES)
    @given(told=st.lists(st.tuples(_report(st.integers(0, 3)), st.booleans()), min_size=1, max_size=8))
    def say(told: list[tuple[dict[str, Any], bool]]) -> None:
        served.operator().call("POST", "/v1/facilities/south/join")
        orders = south.poll()["orders"]
        newest = max((sequence_of(order["job_id"]) for order in orders), default=3)
        for said, hands_in in told:
            sequence = max(0, newest - said["sequence"])
            assert _says(partial(south.poll, {**said, "sequence": sequence})) in (200, 422)
            south.poll()
            if hands_in:
                path = f"/v1/updates/{sequence}/{said.get('attempt', 0)}/{'a' * 64}"
                assert _says(partial(south.commit, path, 0, steps_done=2**53)) in (200, 409, 410)
        assert served.status()["state"] == "running"
        assert north.poll()["over"] is None

    say()
    assert served.replays() > 0


# Strategies, without a network -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Told:
    report: reports.Report


class Bench:
    """The state of a run and one strategy, driven by hand."""

    def __init__(self, strategy: str) -> None:
        kind = STRATEGIES[strategy]
        profiles = tuple(FacilityProfile(name=name, data_weight=0.5) for name in ("evil", "good"))
        options = {"lr_scaling": "inverse"} if strategy in ("fedqueue", "jit") else {}
        self.strategy = kind(Plan(facilities=profiles, round_length=10.0, seconds=1e6), kind.Options(**options))
        self.state = RunState(["evil", "good"])
        self.models = Outcomes(self.state, "0" * 64).models
        Tally(self.state, round_length=10.0, nodes={"evil": 1, "good": 1}, targets=[])
        self.at = 0.0
        self.tell(RunStarted(at=0.0))

    def tell(self, event: Any) -> None:
        commands = self.strategy.handle(event)
        for command in commands:
            encode(command)  # which takes no infinity
        encode(event)
        self.state(event, commands)
        self.at += 0.001  # as a real clock does

    def turn(self) -> None:
        """A timer fires, and a model that was asked for is made."""
        due = self.state.due()
        if due is not None and due[0] < 1e6:
            self.at = max(self.at, due[0])
            self.tell(TimerFired(at=self.at, key=due[1]))
        for version in sorted(self.state.making):
            self.tell(ModelReady(at=self.at, version=version, digest=f"{version:064}"))

    def report(self, facility: str, said: dict[str, Any]) -> None:
        found = read(Told, {"report": {"n": 1, **said}}, "").report
        bound = getattr(found, "bound", None)
        if bound is None or bound.work.base_version in self.models:
            self.tell(reports.event_of(found, facility, self.at, self.state.facilities[facility].posts))

    def arrive(self, job: JobId, steps: int, seconds: float) -> None:
        known = self.state.open_job(job)
        if known is not None:
            base = known.assignment.base_version if known.assignment is not None else self.state.newest
            receipt = Receipt(
                job_id=job,
                attempt=known.attempt,
                base_version=base,
                steps_done=steps,
                train_seconds=seconds,
                admission_delay=seconds,
            )
            self.tell(UpdateArrived(at=self.at, receipt=receipt))

    def good_works(self) -> None:
        for sequence in [job.sequence for job in self.state.facilities["good"].jobs.values()]:
            self.report("good", started(sequence))
            self.report("good", ended(sequence))
            self.arrive(job_id("good", sequence), 10, 1.0)


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
def test_no_strategy_is_broken_by_what_a_facility_reports(strategy: str) -> None:
    @seed(3)
    @settings(_QUIET, max_examples=2 * EXAMPLES)
    @given(acts=st.lists(st.tuples(_report(st.integers(0, 2)), _STEPS, _SECONDS, st.integers(0, 3)), max_size=25))
    def play(acts: list[tuple[dict[str, Any], int, float, int]]) -> None:
        bench = Bench(strategy)
        for report, steps, seconds, what in acts:
            newest = max((job.sequence for job in bench.state.facilities["evil"].jobs.values()), default=0)
            sequence = max(0, newest - report["sequence"])
            if what == 0:
                bench.arrive(job_id("evil", sequence), steps, seconds)
            elif what == 1:
                bench.turn()
            else:
                bench.report("evil", {**report, "sequence": sequence})
            bench.good_works()
        for _ in range(6):
            bench.turn()
            bench.good_works()
        assert bench.state.stopped is None
        if not issubclass(STRATEGIES[strategy], FedAvg):  # which waits for everybody, by its nature
            assert bench.state.facilities["good"].ordered > 1

    play()


# One facility must not take from the others -----------------------------------------------------------------------


def test_a_flood_of_reports_is_told_to_come_later(served: Served) -> None:
    facility = served.facility("south-1")
    order = facility.order()
    many = [{"kind": "submitted", "sequence": order.sequence}] * 700

    def flood() -> None:
        for _ in range(5):
            facility.poll(*many)

    with pytest.raises(CoordinatorUnreachableError, match=r"\(429\)"):
        flood()
    facility.poll()


def test_reports_are_taken_again_after_a_while() -> None:
    now = 0.0
    limits = Limits(lambda: now)
    limits.reports("north", REPORTS_IN_STOCK)
    with pytest.raises(Refused, match="try again later"):
        limits.reports("north", 1)
    limits.reports("south", 1)
    now = 1.0
    limits.reports("north", int(REPORTS_PER_SECOND))


def test_one_facility_cannot_hold_more_than_its_share_of_requests(served: Served) -> None:
    """It begins uploads and does not go on; others are served meanwhile."""
    served.operator().call("POST", "/v1/facilities/south-1/join")
    order = served.facility("south-1").running()
    credential = served.credentials["south-1"]
    held = [Raw(served) for _ in range(MOST_AT_ONCE)]
    try:
        for number, raw in enumerate(held):
            path = f"/v1/updates/{order.sequence}/0/{number:064x}?offset=0&bytes=100"
            raw.send(request("PUT", path, credential=credential, headers=["Content-Length: 100"]))
        with Raw(served) as probe:
            status = 0
            while status != 429:  # until the server has seen them all
                probe.send(request("GET", "/v1/models/0", credential=credential))
                status = probe.status() or 0
                assert status in (200, 404, 429)
        assert served.facility("north").poll()["over"] is None
    finally:
        for raw in held:
            raw.socket.close()
