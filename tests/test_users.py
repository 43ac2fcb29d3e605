"""People with roles at a federation: what each may do, from this machine and from elsewhere, against a live server."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedqueue import tensorfile
from fedqueue.agent.access_file import AccessFile
from fedqueue.agent.http_transport import Client
from fedqueue.cli import main
from fedqueue.coordinator import federation_api, http_api
from fedqueue.coordinator.endpoints import Endpoint
from fedqueue.coordinator.federation_api import LOG_BYTES
from fedqueue.coordinator.rights import RIGHTS
from fedqueue.coordinator.server import ADDRESS
from fedqueue.ledger import FILE, LedgerReader
from tests.coordinators import refusal
from tests.faults.federation import Served

pytestmark = pytest.mark.waits(6)

ROLES = ("operator", "submitter", "viewer")
SECURITY = Path(__file__).parent.parent / "docs" / "security.md"

ALLOWED = "echo 1 > scored"
"""A command that runs of others may have run on the server."""

Say = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One site; a run of the operator's own, one of ann's that goes on, and one of ann's that is over."""
    made = Served(tmp_path_factory.mktemp("users"), sites={"north": {}})
    toml, inputs = made.folder / "federation.toml", made.folder / "inputs"
    toml.write_text(toml.read_text() + f'\n[submissions]\nmodules = ["good"]\ncommands = ["{ALLOWED}"]\n')
    inputs.mkdir(mode=0o700)
    shutil.copy(made.base / "first.safetensors", inputs)
    (inputs / "good.py").write_text("")
    with made:
        for name, role in (("ann", "submitter"), ("bob", "submitter"), ("vic", "viewer"), ("olga", "operator")):
            assert main(["user", str(made.folder), "add", name, "--role", role, "--out", str(file(made, name))]) == 0
        made.submit("theirs", rounds=100_000)
        for name, rounds in (("first", 100_000), ("short", 1)):
            assert main(["submit", str(file(made, "ann")), str(made.config(name, rounds=rounds))]) == 0
        made.wait_for_end("short")
        made.wait("models", lambda: sum(1 for _ in made.run_folder("first").glob("objects/*.safetensors")) > 1)
        yield made


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """A command's exit code, and what it said."""

    def run(*words: object) -> tuple[int, str]:
        capsys.readouterr()
        code = main([str(word) for word in words])
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


def file(served: Served, user: str) -> Path:
    return served.base / f"{user}.access"


def credential(served: Served, who: str) -> str | None:
    if who == "nobody":
        return None
    if who == "facility":
        return str(json.loads((served.home("north") / "credential").read_text())["credential"])
    name = {"operator": "olga", "submitter": "bob", "viewer": "vic"}[who]
    return AccessFile.load(file(served, name)).credential


def url(served: Served) -> str:
    return str(json.loads((served.folder / ADDRESS).read_text())["local"])


# The table -----------------------------------------------------------------------------------------------------------


def test_the_table_of_the_documentation_is_that_of_the_code() -> None:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in _rights_table()]
    heads = rows[0][1:]
    said = {
        role: {right: extent for right, extent in zip(heads, cells, strict=True) if extent != "-"}
        for role, *cells in rows[2:]
    }
    assert said == RIGHTS


def _rights_table() -> list[str]:
    found = re.search(r"(\| who \|.*?)\n\n", SECURITY.read_text(), re.DOTALL)
    assert found is not None
    return found[1].splitlines()


TABLES = {"federation": federation_api.ENDPOINTS, "run": http_api.ENDPOINTS}


def test_every_endpoint_refuses_everybody_who_has_not_its_right(served: Served) -> None:
    """bob, a submitter, asks of ann's run: what is only one's own is refused to him."""
    for where, table in TABLES.items():
        for endpoint in table:
            for who in ("nobody", "facility", *ROLES):
                extent = None if endpoint.right is None else RIGHTS.get(who, {}).get(endpoint.right)  # type: ignore[call-overload]
                may = extent == "all" or (extent == "own" and (who == "facility" or endpoint.right == "renew"))
                if endpoint.path == "/v1/run/stop" and may:
                    continue  # others need the run
                status, what = asked(served, where, endpoint, who), f"{who}: {endpoint.method} {where} {endpoint.path}"
                assert status < 500, what
                if endpoint.right is None:
                    assert status not in (401, 403), what
                elif who == "nobody":
                    assert status == 401, what
                else:
                    assert (status == 403) == (not may), what
                    assert status != 401, what


def asked(served: Served, where: str, endpoint: Endpoint, who: str) -> int:
    """The status of the answer."""
    numbers = dict.fromkeys(("version", "sequence", "attempt"), "7")
    words = {**numbers, "part": "1", "sha256": "a" * 64, "facility": "nobody", "run": "first", "user": "nobody"}
    words["file"] = "page.css"
    path = re.sub(r"{(\w+)}", lambda name: words[name[1]], endpoint.path)
    path = ("" if where == "federation" else f"/runs/{served.run_id('first')}") + path
    path += "?offset=0&bytes=8" if endpoint.query else ""
    client = Client(url(served), credential=credential(served, who))
    try:
        with client._request(endpoint.method, path, {}, b"[]" if endpoint.body else None) as response:
            return response.status
    finally:
        client.close()


# What each may do, by commands ---------------------------------------------------------------------------------------


def test_a_submitter_steers_his_own_runs_and_no_others(served: Served, say: Say) -> None:
    ann, bob = file(served, "ann"), file(served, "bob")
    for run, other in (("first", bob), ("theirs", ann)):
        code, said = say("pause", other / "runs" / run)
        assert (code, said.count("\n")) == (9, 1)
        assert "only its owner and operators may do that" in said
        assert say("stop", other / run)[0] == say("drain", other / "runs" / run, "north")[0] == 9
    assert say("pause", ann / "runs" / "first") == (0, "paused\n")
    assert "paused" in say("status", ann / "runs" / "first")[1]
    assert say("resume", ann / "first") == (0, "goes on\n")
    assert say("drain", ann / "runs" / "first", "north")[0] == 0
    assert say("join", ann / "runs" / "first", "north") == (0, "north may have work\n")
    assert say("pause", file(served, "olga") / "runs" / "first")[0] == 0
    assert say("resume", served.run_folder("first"))[0] == 0, "the operator on the server's machine"
    with LedgerReader(served.run_folder("first") / FILE) as ledger:
        assert ledger.meta["owner"] == "/users/ann"


def test_a_viewer_looks_and_does_nothing_else(served: Served, say: Say, tmp_path: Path) -> None:
    vic = file(served, "vic")
    found = json.loads(say("list", vic, "--json")[1])
    owners = {run["name"]: run.get("owner", "") for run in found["runs"]}
    assert (owners["theirs"], owners["first"], owners["short"]) == ("", "ann", "ann")
    assert say("status", vic / "runs" / "first")[1].startswith("first")
    assert say("logs", vic / "runs" / "first")[0] == 0
    refused = [
        say("submit", vic, served.config("vics")),
        say("pause", vic / "runs" / "first"),
        say("stop", vic / "runs" / "first"),
        say("drain", vic / "runs" / "first", "north"),
        say("invite", vic, "south"),
        say("revoke", vic, "north"),
        say("user", vic, "list"),
        say("user", vic, "add", "vic", "--role", "operator", "--out", tmp_path / "more.access"),
        say("user", vic, "remove", "ann"),
    ]
    for code, said in refused:
        assert (code, said.count("\n")) == (9, 1), said
        assert "this is for operators" in said
    assert not (tmp_path / "more.access").exists()


def test_an_operator_from_elsewhere_manages_and_roles_change_at_once(served: Served, say: Say, tmp_path: Path) -> None:
    olga, cleo = file(served, "olga"), tmp_path / "cleo.access"
    assert "give a file for the credential" in say("user", olga, "add", "cleo", "--role", "viewer")[1]
    assert say("user", olga, "add", "cleo", "--role", "viewer", "--out", cleo)[0] == 0
    assert cleo.stat().st_mode & 0o777 == 0o600
    assert {"name": "cleo", "role": "viewer"} in json.loads(say("user", olga, "list", "--json")[1])
    assert say("pause", cleo / "runs" / "theirs")[0] == 9
    assert say("user", served.folder, "add", "cleo", "--role", "operator")[0] == 0
    assert say("pause", cleo / "runs" / "theirs")[0] == 0, "the same credential, another role"
    assert say("resume", cleo / "runs" / "theirs")[0] == 0
    older = AccessFile.load(cleo)
    anew = tmp_path / "anew.access"
    assert say("user", olga, "add", "cleo", "--role", "viewer", "--out", anew)[0] == 0
    code, said = say("list", cleo)
    assert (code, said.count("\n")) == (9, 1)
    assert "unknown or revoked" in said
    assert older.credential != AccessFile.load(anew).credential
    assert say("user", olga, "remove", "cleo") == (0, "cleo is shut out; the runs that were submitted go on\n")
    assert say("list", anew)[0] == 9
    assert say("user", olga, "remove", "cleo")[0] == 2


# From elsewhere ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", ["first", "short"])
def test_models_and_logs_come_from_elsewhere_also_when_a_run_is_over(
    run: str, served: Served, say: Say, tmp_path: Path
) -> None:
    vic = file(served, "vic") / "runs" / run
    listed = json.loads(say("models", vic, "--json")[1])
    newest = next(model for model in listed if model["newest"])
    out = tmp_path / "model.safetensors"
    for which in ("newest", newest["version"]) if run == "short" else ("newest",):
        code, said = say("models", vic, which, "--out", out, "--replace")
        assert code == 0, said
        assert said.startswith(f"wrote {out}: model ")
        assert tensorfile.read_header(out).entries
    assert "exists already" in say("models", vic, "newest", "--out", out)[1]
    assert "has no model best" in say("models", vic, "best", "--out", tmp_path / "best.safetensors")[1]
    assert "has no model 999999; kept are" in say("models", vic, "999999", "--out", tmp_path / "none.safetensors")[1]
    if run == "short":
        assert "all rounds done" in say("logs", vic)[1]
        code, said = say("status", vic)
        assert (code, said) == (9, "fedqueue: error: the run is over: all rounds done\n")


def test_a_download_goes_on_where_it_was_cut_off(served: Served, tmp_path: Path) -> None:
    held = AccessFile.load(file(served, "vic"))
    with held.client(file(served, "vic")) as client:
        (model,) = client.kept_models("short").models[-1:]
        whole = tmp_path / "whole"
        client.kept_model("short", model, whole)
        (tmp_path / "rest.part").write_bytes(whole.read_bytes()[:100])
        path = f"/v1/runs/short/models/{model.version}"
        with client._request("GET", path, {"Range": "bytes=100-"}, None) as response:
            assert response.status == 206
            assert response.read() == whole.read_bytes()[100:]
        client.kept_model("short", model, tmp_path / "rest")
        assert (tmp_path / "rest").read_bytes() == whole.read_bytes()


def test_of_a_long_log_the_end_comes_without_control_characters(served: Served, say: Say) -> None:
    log = served.run_folder("short") / "run.log"
    before = log.read_bytes()
    try:
        log.write_bytes(b"older than that\n" * (LOG_BYTES // 16) + b"the \x1b[2Jend \xff\n")
        said = say("logs", file(served, "vic") / "runs" / "short")[1]
    finally:
        log.write_bytes(before)
    assert len(said) <= LOG_BYTES + 10
    first, second, *_, last = said.splitlines()
    assert (first, second, last) == ("...", "older than that", "the ?[2Jend \ufffd")


def test_what_cannot_be_is_said_in_one_line(served: Served, say: Say, tmp_path: Path) -> None:
    ann = file(served, "ann")
    away = tmp_path / "away.access"
    AccessFile(url="http://127.0.0.1:9", name="ann", credential="c" * 43).save(away)
    open_to_all = tmp_path / "open.access"
    shutil.copy(ann, open_to_all)
    open_to_all.chmod(0o640)
    config = served.config("ours")
    config.chmod(0o600)
    for words, expected in (
        (("status", ann / "runs" / "nowhere"), "there is no run 'nowhere' here; there is first, "),
        (("logs", ann / "nowhere"), "there is no run 'nowhere' here"),
        (("models", ann / "nowhere"), "there is no run 'nowhere' here"),
        (("pause", ann), "is a federation; name one of its runs"),
        (("submit", ann / "runs" / "first", config), "is not the folder of a federation"),
        (("list", away), "cannot be reached"),
        (("pause", away / "runs" / "first"), "cannot be reached"),
        (("list", open_to_all), "others may read it"),
        (("list", config), "is neither a folder nor an access file"),
        (("status", ann / "some" / "where"), "name a run as"),
        (("models", ann / "first", "newest"), "say where the model is to be written"),
    ):
        code, said = say(*words)
        assert code != 0, words
        assert expected in said, words
        assert said.count("\n") == 1, said


# What a submission may not -------------------------------------------------------------------------------------------


def attacks(served: Served) -> dict[str, tuple[dict[str, Any], str]]:
    outside = served.base / "outside.safetensors"
    tensorfile.write(outside, {"weight": np.zeros(3, np.float32)})
    inputs = served.folder / "inputs"
    for link, target in (("link.safetensors", outside), ("up", served.base), ("circle", inputs / "circle")):
        if not (inputs / link).is_symlink():
            (inputs / link).symlink_to(target)
    (inputs / "evil.py").write_text("from pathlib import Path\nPath(__file__).with_name('ran').touch()\n")
    stays = "must be a file in the folder inputs of the federation"
    runs = "would run on the server"
    code = {"model": {}, "evaluation": {"where": "coordinator"}}
    return {
        "above": ({"model": {"initial": "../federation.toml"}}, stays),
        "above and back": ({"model": {"initial": "../../outside.safetensors"}}, stays),
        "absolute": ({"model": {"initial": str(outside)}}, stays),
        "absolute, inside": ({"model": {"initial": str(inputs / "first.safetensors")}}, stays),
        "a link": ({"model": {"initial": "link.safetensors"}}, stays),
        "a folder that is a link": ({"model": {"initial": "up/outside.safetensors"}}, stays),
        "a circle": ({"model": {"initial": "circle"}}, stays),
        "a zero": ({"model": {"initial": "a\0b"}}, stays),
        "a queue's log": ({"facility": [{"name": "north", "queue": {"kind": "trace", "file": "/etc/passwd"}}]}, stays),
        "a task": ({"task": {"name": "evil:run"}, **code}, runs),
        "a task of the system": ({"task": {"name": "os:getcwd"}, **code}, runs),
        "options": ({"task": {"name": "cifar100", "options": {"folder": "/"}}, **code}, runs),
        "a module": ({"run": {"modules": ["evil"]}}, runs),
        "a module that is none": ({"run": {"modules": "evil"}}, runs),
        "a scorer": ({"evaluation": {"where": "coordinator", "command": f"touch {inputs}/ran"}}, runs),
    }


def submit(served: Served, who: str, name: str, changes: dict[str, Any], **more: Any) -> Any:
    tree: dict[str, Any] = {
        "run": {"name": name, "strategy": "fedasync", "rounds": 1, "round_length": 0.5},
        "task": {"name": "timing"},
        "model": {"initial": "first.safetensors"},
        "evaluation": {"where": "nowhere"},
        "facility": [{"name": "north"}],
    }
    for key, value in changes.items():
        tree[key] = {**tree[key], **value} if key == "run" else value
    client = Client(url(served), credential=credential(served, who))
    return client.call("POST", "/v1/runs", {"config": tree, **more})


def test_a_submission_from_elsewhere_reads_and_runs_nothing_on_the_server(served: Served) -> None:
    there = {path.name for path in (served.folder / "runs").iterdir()}
    for role in ("submitter", "operator"):  # an operator who is elsewhere is elsewhere
        for what, (changes, expected) in attacks(served).items():
            refused = refusal(submit, served, role, "attack", changes)
            assert (refused.status, expected in refused.answer.reason) == (422, True), f"{what}: {refused}"
    refused = refusal(submit, served, "submitter", "attack", {}, folder="/")
    assert "folder: is for who is on the server's machine" in refused.answer.reason
    assert not (served.folder / "inputs" / "ran").exists()
    assert {path.name for path in (served.folder / "runs").iterdir()} == there, "nothing is left of them"


def test_who_is_elsewhere_is_told_no_folder_of_the_server(served: Served, say: Say, tmp_path: Path) -> None:
    facilities = [{"name": "north"}, {"name": "stranger"}]
    begun = submit(served, "submitter", "unenrolled", {"facility": facilities, "server": {"wait_for": 1}})
    assert "stranger is not enrolled; an operator of the federation invites it" in begun["notes"]
    client = Client(url(served), credential=credential(served, "viewer"))
    said = [begun, client.call("GET", "/v1/federation"), client.of(begun["run"]).call("GET", "/v1/status")]
    assert str(served.base) not in json.dumps(said)
    assert f"{served.folder}/runs/unenrolled" in say("list", served.folder, "--json")[1], "who is there sees it"
    served.wait_for_end("unenrolled")


def test_what_the_operator_names_may_run(served: Served) -> None:
    """By name and no other; and the worker's command of a config is run nowhere in a federation."""
    ran = served.base / "ran"
    good = {"run": {"modules": ["good"]}, "worker": {"command": f"touch {ran}"}}
    scored = {"evaluation": {"where": "coordinator", "command": ALLOWED}}
    assert submit(served, "submitter", "good", good)["name"] == "good"
    assert submit(served, "submitter", "scored", scored)["name"] == "scored"
    other = {"evaluation": {"where": "coordinator", "command": f"{ALLOWED}; id"}}
    assert refusal(submit, served, "submitter", "other", other).status == 422
    served.wait("its score", (served.folder / "inputs" / "scored").exists)
    served.wait_for_end("good")
    assert not ran.exists()
