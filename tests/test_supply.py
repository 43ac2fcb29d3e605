"""What this software is made of: the lock file that `make` installs from, and the bill of materials."""

from __future__ import annotations

import json
import re
import tomllib
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from fedqueue.cli import main
from fedqueue.cli.sbom import bill_of_materials

ROOT = Path(__file__).parent.parent


def locked() -> dict[str, tuple[Version, int]]:
    """By name: the version, and how many hashes there are for its files."""
    found = {}
    for block in re.split(r"\n(?=[^\s#])", (ROOT / "requirements.lock").read_text())[1:]:
        pin, *hashes = block.replace("\\\n", "").split()
        name, _, version = pin.partition("==")
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", one) for one in hashes), block
        found[name] = Version(version), len(hashes)
    return found


def test_everything_that_make_installs_is_locked_by_hash() -> None:
    (recipe,) = re.findall(r"\$\(READY\):.*?\n\n", (ROOT / "Makefile").read_text(), re.DOTALL)
    installs = [line for line in recipe.splitlines() if "pip install" in line]
    assert len(installs) == 2
    assert "--require-hashes --requirement requirements.lock" in installs[0]
    assert "--no-deps --no-build-isolation" in installs[1], "our own, and nothing that they ask for"
    there = locked()
    assert all(hashes for _, hashes in there.values())
    # uplot lies in the package itself, and tests/test_page.py compares its sha256.
    used = {component["name"].lower().replace("_", "-") for component in bill_of_materials()["components"]}
    assert used <= {*there, "fedqueue-reproduction", "pip", "uplot"}, "what is installed and not locked"


def test_what_is_locked_is_what_the_project_asks_for() -> None:
    there = locked()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    wanted = [*project["project"]["dependencies"], *project["build-system"]["requires"], *chain(*extras.values())]
    for requirement in map(Requirement, wanted):
        if requirement.name != "fedqueue":
            assert there[requirement.name][0] in requirement.specifier, requirement


def test_the_lock_names_no_place() -> None:
    assert not re.search(r"://|@|index", (ROOT / "requirements.lock").read_text())


def test_the_bill_of_materials_names_every_package_and_what_it_needs(tmp_path: Path) -> None:
    assert main(["sbom", "--out", str(tmp_path / "sbom.json")]) == 0
    found = json.loads((tmp_path / "sbom.json").read_text())
    assert (found["bomFormat"], found["specVersion"]) == ("CycloneDX", "1.6")
    parts = {part["bom-ref"]: part for part in [found["metadata"]["component"], *found["components"]]}
    assert len(parts) == 1 + len(found["components"])
    needs = {one["ref"]: set(one["dependsOn"]) for one in found["dependencies"]}
    assert set(needs) == set(parts)
    assert set().union(*needs.values()) <= set(parts)
    names = {ref: part["name"] for ref, part in parts.items()}
    (ours,) = [ref for ref, name in names.items() if name == "fedqueue"]
    assert {"numpy", "rich", "urllib3"} <= {names[ref] for ref in needs[ours]}
    assert all(part["version"] and part["purl"] == ref for ref, part in parts.items())
    assert sum("licenses" in part for part in parts.values()) > 0.9 * len(parts)
