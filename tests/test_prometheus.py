"""Figures for Prometheus, as its own client reads them, and the dashboard that shows them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fedqueue.coordinator.prometheus import STATES
from fedqueue.protocol.state import PHASES
from tests.coordinators import FACILITIES, Served, serving

pytestmark = pytest.mark.waits(4)

DASHBOARD = Path(__file__).parents[1] / "examples" / "grafana" / "fedqueue.json"

Samples = dict[str, dict[tuple[str, ...], float]]


def scraped(served: Served) -> Samples:
    """Values by the sorted values of their labels but the run's, by metric."""
    request = Request(f"{served.url}/metrics", headers={"Authorization": f"Bearer {served.operator_secret}"})
    with urlopen(request) as answer:
        text = answer.read().decode()
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "run"}
            assert sample.labels["run"] == "run", "the name of its folder"
            found.setdefault(sample.name, {})[tuple(labels[name] for name in sorted(labels))] = sample.value
    return found


def test_figures_are_those_of_the_run_and_labels_are_bounded(tmp_path: Path) -> None:
    with serving(tmp_path, plain=True) as served:
        before = scraped(served)
        assert before["fedqueue_run_state"][("waiting",)] == 1
        assert "fedqueue_score" not in before, "nobody knows it yet"
        served.facility("north").poll()
        order = served.facility("north").running()
        found, status = scraped(served), served.status()
        assert [state for (state,), value in found["fedqueue_run_state"].items() if value] == ["running"]
        assert {state for (state,) in found["fedqueue_run_state"]} == set(STATES)
        assert set(found["fedqueue_open_jobs"]) == {(name, phase) for name in FACILITIES for phase in PHASES}
        assert found["fedqueue_open_jobs"]["north", "running"] == 1
        assert found["fedqueue_jobs_total"][("submitted",)] == sum(one["ordered"] for one in status["facilities"])
        assert set(found["fedqueue_node_seconds_total"]) == {(name,) for name in FACILITIES}
        assert found["fedqueue_facility_heard_seconds_ago"][("north",)] < 600
        assert order.sequence == 0
        served.operator().call("POST", "/v1/run/pause")
        assert scraped(served)["fedqueue_run_state"][("paused",)] == 1
        for panel in json.loads(DASHBOARD.read_text())["panels"]:
            for target in panel["targets"]:
                named = set(re.findall(r"fedqueue_\w+", target["expr"]))
                assert named, panel["title"]
                assert named <= {*found, "fedqueue_score"}, panel["title"]
