"""Secure aggregation: the sum of a group is exact, nothing less than the sum can be read, and kills change nothing."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from fedqueue.agent.jobs import Jobs
from fedqueue.agent.masking import BASE, PEERS, UPDATE, Masking, NotMaskedError
from fedqueue.config import parse
from fedqueue.errors import ConfigError
from fedqueue.files import MASKS
from fedqueue.ledger import FILE, LedgerReader
from fedqueue.masks import mask, masked_bytes, name_of, new_secret, public_key, unmask, why_not
from fedqueue.protocol.codec import read
from fedqueue.protocol.contract import MaskGroup, MaskShare, facility_of
from fedqueue.tensorfile import read_header
from tests.coordinators import Facility, Served, refusal, request, serving, update
from tests.waiting import wait_for

ROOT = Path(__file__).parent.parent
NAMES = ("north", "south", "west", "east")


def group_of(secrets_: dict[str, str], shares: Sequence[MaskShare], version: int = 1) -> MaskGroup:
    keys = {name: public_key(secret) for name, secret in secrets_.items()}
    return MaskGroup(run="run", version=version, updates=list(shares), keys=keys)


# The sum --------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    owners=st.lists(st.sampled_from(NAMES), min_size=2, max_size=6),
    large=st.sampled_from([1e-3, 1.0, 1e3]),
)
def test_the_sum_of_a_group_is_that_of_its_updates_and_of_fewer_it_is_noise(
    tmp_path_factory: pytest.TempPathFactory, seed: int, dtype: torch.dtype, owners: list[str], large: float
) -> None:
    folder, generator = tmp_path_factory.mktemp("masks"), torch.Generator().manual_seed(seed)

    def model() -> dict[str, torch.Tensor]:
        draw = torch.randn(40, generator=generator, dtype=torch.float64) * large
        return {
            "w": draw[:20].reshape(4, 5).to(dtype),
            "phase": torch.view_as_complex(draw[20:28].reshape(4, 2).float()),
            "norm.running_var": draw[28:32].abs().to(dtype),
            "norm.num_batches_tracked": torch.tensor(7),
            "empty": torch.zeros(0, dtype=dtype),
        }

    bases = [model(), model()]
    for number, base in enumerate(bases):
        save_file(base, folder / f"base{number}")
    known = {name: new_secret() for name in owners}
    shares, files, wanted = [], {name: dict[MaskShare, tuple[Path, Path]]() for name in known}, bases[0]["w"].double()
    variance = torch.zeros(4, dtype=torch.float64)
    for number, name in enumerate(owners):
        share = MaskShare(job_id=f"{name}/{number}", attempt=0, part=0, weight=1 / len(owners))
        save_file(trained := model(), folder / f"update{number}")
        shares.append(share)
        files[name][share] = folder / f"update{number}", folder / f"base{number % 2}"
        wanted = wanted + share.weight * (trained["w"].double() - bases[number % 2]["w"].double())
        variance += share.weight * trained["norm.running_var"].double()
    group = group_of(known, shares)
    given_by = {name: folder / f"given-{name}" for name in known}
    for name, path in given_by.items():
        digest = mask(group, name, known[name], files[name], path)
        assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
        assert digest == mask(group, name, known[name], files[name], folder / "again"), "made again it is the same"
        assert path.stat().st_size == masked_bytes(read_header(folder / "base0"))
    unmask(folder / "base0", list(given_by.values()), folder / "out")
    made = load_file(folder / "out")
    kind = torch.finfo(dtype)
    step = 1e-8 + kind.smallest_normal * kind.eps  # between the smallest numbers of its type
    close: dict[str, Any] = {"rtol": 2e-2 if dtype == torch.bfloat16 else 2e-3 if dtype == torch.float16 else 1e-6}
    assert torch.allclose(made["w"].double(), wanted, atol=1e-6 * large + step, **close)
    assert torch.allclose(made["norm.running_var"].double(), variance, atol=1e-6 * large + step, **close)
    assert made["norm.num_batches_tracked"] == 7
    assert {name: t.dtype for name, t in made.items()} == {name: t.dtype for name, t in bases[0].items()}
    if len(known) > 1:
        some = list(given_by.values())[:-1]
        numbers = sum(np.frombuffer(path.read_bytes(), "<u8") for path in some)
        assert (numbers >> np.uint64(54)).std() > 100, "without one of them the numbers are anywhere"


def test_every_group_has_streams_of_its_own(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(500)}, tmp_path / "base")
    known = {name: new_secret() for name in NAMES[:3]}
    share = MaskShare(job_id="north/0", attempt=0, part=0, weight=0.5)
    others = [MaskShare(job_id=f"{name}/0", attempt=0, part=0, weight=0.25) for name in NAMES[1:3]]
    seen = []
    for group in (
        group_of(known, [share, *others]),
        group_of(known, [share, *others], version=2),
        group_of({**known, "west": new_secret()}, [share, *others]),
    ):
        mask(group, "north", known["north"], {share: (tmp_path / "base", tmp_path / "base")}, tmp_path / "out")
        seen.append(np.frombuffer((tmp_path / "out").read_bytes(), "<u8"))
    for number, one in enumerate(seen):
        for other in seen[:number]:
            assert not (one == other).any()


def test_what_is_too_large_for_the_sum_is_refused_before_it_is_masked(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(3), "v": torch.zeros(2)}, tmp_path / "base")
    for value, good in ((1e6, True), (2e6, False), (float("inf"), False)):
        save_file({"w": torch.tensor([0.0, value, 1.0]), "v": torch.ones(2)}, tmp_path / "update")
        assert (why_not(tmp_path / "update", tmp_path / "base") is None) == good


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"run": {"strategy": "fedasync"}}, "does not sum the updates of several"),
        ({"run": {"strategy": "fedcompass"}}, "does not sum the updates of several"),
        ({"run": {"strategy": "jit"}}, "strategy.jit.absent"),
        ({"run": {"strategy": "jit"}, "strategy": {"jit": {"absent": 0.0}}}, "strategy.jit.rounds"),
        ({"trust": {"masked": True, "rule": "median"}}, "can only be summed"),
        ({"trust": {"masked": True, "least_members": 4}}, "there are only 3"),
        ({"model": {"roles": {"a.*": "factor"}}}, "factors cannot be masked"),
    ],
)
def test_what_does_not_go_with_masks_is_said_in_one_line(changes: dict[str, Any], says: str) -> None:
    tree: dict[str, Any] = {
        "run": {"strategy": "fedavg", "rounds": 1},
        "trust": {"masked": True},
        "facility": [{"name": name} for name in NAMES[:3]],
    }
    for key, value in changes.items():
        tree[key] = {**tree.get(key, {}), **value}
    with pytest.raises(ConfigError, match=says):
        parse(tree)


# An agent and groups that it must not give to -------------------------------------------------------------------------


def test_an_agent_gives_to_one_good_group_and_to_no_other(tmp_path: Path) -> None:
    given: list[str] = []
    here = SimpleNamespace(
        home=tmp_path,
        site_home=tmp_path,
        run="run",
        facility="north",
        settings=SimpleNamespace(masked_least_members=3, poll_seconds=1.0),
        log=SimpleNamespace(info=lambda said: None),
    )
    transport = SimpleNamespace(give=lambda path, version, sha256, group: given.append(group))
    made = Masking(cast(Jobs, here), cast(Any, transport), cast(Any, None))
    known = {name: new_secret() for name in NAMES}
    known["north"] = made._own_secret()

    def group(names: Sequence[str], sequence: int = 0, heavy: str = "", **changes: Any) -> MaskGroup:
        place = tmp_path / "masked" / f"{sequence}-0-0"
        if not place.exists():
            place.mkdir(parents=True)
            for name in (UPDATE, BASE):
                save_file({"w": torch.zeros(3)}, place / name)
        weights = {name: 0.01 if heavy and name != heavy else 0.3 for name in names}
        shares = [MaskShare(job_id=f"{n}/{sequence}", attempt=0, part=0, weight=w) for n, w in weights.items()]
        return group_of({**{name: known[name] for name in names}, **changes}, shares)

    def refused(wanted: MaskGroup) -> str:
        with pytest.raises(NotMaskedError) as error:
            made._give(wanted)
        return str(error.value)

    assert "this site wants 3" in refused(group(NAMES[:2]))
    assert "weigh so little" in refused(group(NAMES[:3], heavy="north"))
    assert "another key for this facility" in refused(group(NAMES[:3], north=new_secret()))
    assert "two facilities of the group have one key" in refused(group(NAMES[:3], west=known["south"]))
    (tmp_path / PEERS).unlink(missing_ok=True)
    first = group(NAMES[:3])
    here.settings.masked_least_members = 3
    transport.give = lambda *_: (_ for _ in ()).throw(NotMaskedError("cut off"))
    assert refused(first) == "cut off"
    assert "masked once alone" in refused(group(NAMES)), "it is bound to the first group, which was not given yet"
    transport.give = lambda path, version, sha256, group: given.append(group)
    made._give(first)
    assert given == [name_of(first)]
    made.keep(0, (0, 0), tmp_path / "none", 0)  # the verdict was lost, and the agent hands in once more
    assert "not here any more" in refused(first), "what was given is cleared away, and does not come back"
    assert "the key of west is not the one that it had" in refused(group(NAMES[:3], sequence=1, west=new_secret()))
    assert given == [name_of(first)]
    made.close()


# A server at work -----------------------------------------------------------------------------------------------------


def hold(served: Served, names: Sequence[str], known: dict[str, str]) -> dict[str, Any]:
    """Each has an order, and says that its update waits for a group."""
    for name in names:
        served.facility(name).poll(mask_key=public_key(known[name]))
    orders = {name: served.facility(name).running() for name in names}
    for name in names:
        path = f"/v1/updates/{orders[name].sequence}/0/{secrets.token_hex(32)}"
        assert served.facility(name).commit(path, 0, masked=True)["status"] == "accepted"
    return orders


def asked(one: Facility, key: str) -> MaskGroup | None:
    answer = one.poll(mask_key=key)
    assert answer["masked"]
    return read(MaskGroup, answer["group"], "group") if answer.get("group") else None


def give(one: Facility, group: MaskGroup, content: bytes, name: str | None = None) -> None:
    """As agents do."""
    path = one.served.log.with_name(f"{one.name}.given")
    path.write_bytes(content)
    one.client.give(path, group.version, hashlib.sha256(content).hexdigest(), name or name_of(group))


@pytest.fixture
def masked_run() -> dict[str, Any]:
    trust = {"masked": True, "mask_seconds": 3.0}
    return {"strategy": "fedavg", "options": {"steps": 10}, "trust": trust, "server": {"wait_for": 3}}


def test_a_group_makes_a_model_and_a_server_takes_nothing_else(tmp_path: Path, masked_run: dict[str, Any]) -> None:
    names, known = NAMES[:3], {name: new_secret() for name in NAMES}
    with serving(tmp_path, names, plain=True, **masked_run) as served:
        orders = hold(served, names, known)
        groups = {name: asked(served.facility(name), public_key(known[name])) for name in names}
        group = groups["north"]
        assert group is not None
        assert groups == dict.fromkeys(names, group)
        (base,) = (served.folder / "objects").glob("*.safetensors")
        for name, value in zip(names, (0.25, 0.5, 1.0), strict=True):
            (tmp_path / name).write_bytes(update(tmp_path, value))
            share = next(one for one in group.updates if facility_of(one.job_id) == name)
            mask(group, name, known[name], {share: (tmp_path / name, base)}, tmp_path / f"{name}.sum")
        north = served.facility("north")
        good = (tmp_path / "north.sum").read_bytes()
        assert refusal(give, north, group, good[:-8]).status == 413
        assert refusal(give, north, group, good, "0" * 64).status == 410
        assert refusal(north.put, orders["north"], update(tmp_path)).status == 422, "nothing comes as it is"
        for name in names:
            give(served.facility(name), group, (tmp_path / f"{name}.sum").read_bytes())
        wait_for(lambda: served.status()["model"] == 1, "the model", served.said)
        with LedgerReader(served.folder / FILE) as ledger:
            (ready,) = ledger.rows("SELECT body FROM events WHERE kind = 'ModelReady'")
            arrived = ledger.rows("SELECT body FROM events WHERE kind = 'UpdateArrived'")
        digest = json.loads(ready["body"])["digest"]
        model = load_file(served.folder / "objects" / f"{digest}.safetensors")["weight"]
        assert torch.allclose(model, torch.full_like(model, (0.25 + 0.5 + 1.0) / 3), atol=1e-7)
        assert all(json.loads(row["body"])["receipt"]["digest"] == "" for row in arrived)
        assert refusal(give, north, group, good).status == 410, "its model is made"
        assert served.replays() > 0


def test_a_group_whose_member_gives_nothing_is_void_and_says_so(tmp_path: Path, masked_run: dict[str, Any]) -> None:
    names, known = NAMES[:3], {name: new_secret() for name in NAMES}
    with serving(tmp_path, names, plain=True, **masked_run) as served:
        hold(served, names, known)
        for name in names[:2]:
            one = served.facility(name)
            group = asked(one, public_key(known[name]))
            assert group is not None
            size = masked_bytes(read_header(next((served.folder / "objects").glob("*.safetensors"))))
            give(one, group, secrets.token_bytes(size))
            assert asked(one, public_key(known[name])) is None, "it gave"
        wait_for(lambda: served.status()["model"] == 1, "the model, which stays as it was", served.said)
        with LedgerReader(served.folder / FILE) as ledger:
            rows = [json.loads(row["body"]) for row in ledger.rows("SELECT body FROM commands WHERE kind = 'Record'")]
        fates = {row["facts"]["job"]: row["facts"] for row in rows if row["kind"] == "fate"}
        assert [found["fate"] for found in fates.values()] == ["rejected"] * 3
        assert all("is void: west did not give its part in time" in found["reason"] for found in fates.values())
        status = served.status()
        assert status["state"] == "running"
        states = {one["name"]: one["state"] for one in status["facilities"]}
        assert states == {"north": "active", "south": "active", "west": "suspended"}, (
            "it stalls no round after this one"
        )
        assert not list((served.folder / "masked").iterdir()), "nothing is left of it"
        assert served.replays() > 0


def test_strangers_and_others_are_refused_at_a_group(tmp_path: Path, masked_run: dict[str, Any]) -> None:
    from tests.coordinators import Raw

    with serving(tmp_path, NAMES[:3], plain=True, **masked_run) as served:
        path = f"/v1/masked/1/{'0' * 64}"
        for method in ("GET", "PUT", "POST"):
            with Raw(served) as raw:
                raw.send(request(method, f"{path}?offset=0&bytes=8", b"{}" if method == "POST" else b""))
                assert raw.status() == 401
        north = served.facility("north")
        assert refusal(north.client.call, "GET", path).status == 410, "no group waits"


KILLS = """
import json, sys
from pathlib import Path
from tests.faults.schedules import Kill, Schedule, perform

rounds = {"margin": 0.05, "min_train_budget": 0.05, "min_steps": 3}
for number, point in enumerate(["", *sys.argv[2:]]):
    kills = [Kill("coordinator" if point == "mask.kept" else "north", point)]
    if not point:
        kills = [Kill("coordinator", after=0.8), Kill("south", after=1.2)]
    strategy, options = ("fedqueue", rounds) if number % 2 else ("fedavg", {"steps": 5})
    found = perform(Schedule(7, strategy, options, 3, tuple(kills), masked=True), Path(sys.argv[1]) / str(number))
    print(json.dumps([point, found.kills, found.error]), flush=True)
"""


@pytest.mark.waits(40)
def test_a_kill_at_any_point_of_a_masked_run_loses_nothing_and_counts_nothing_twice(tmp_path: Path) -> None:
    """The last model is what the ledger says, to the last update. In a process of its own: a fork wants no threads."""
    argv = [sys.executable, "-c", KILLS, str(tmp_path), *MASKS]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    assert [point for point, _, _ in outcomes] == ["", *MASKS], done.stderr[-3000:]
    assert not [error for _, _, error in outcomes if error], "\n".join(error for _, _, error in outcomes)
    assert all(kills for _, kills, _ in outcomes)
