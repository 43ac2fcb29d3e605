"""What this installation is made of: a bill of materials in CycloneDX's JSON, of FedQueue and every installed package
that it needs or can use, with versions, licences and what needs what. It is read from the packages' own metadata."""

from __future__ import annotations

import argparse
import json
import re
import uuid
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any, Final

from fedqueue import __version__
from fedqueue.files import write_json

HELP = "a bill of materials of this installation (CycloneDX)"

FORMAT: Final = "1.6"
ROOT: Final = "fedqueue"
BUNDLED: Final = {
    "type": "library",
    "bom-ref": "pkg:npm/uplot@1.6.32",
    "name": "uplot",
    "version": "1.6.32",
    "purl": "pkg:npm/uplot@1.6.32",
    "licenses": [{"expression": "MIT"}],
}
"""What lies in the package itself and is of others: docs/decisions/0020-a-live-page.md."""
LICENCE_LENGTH: Final = 200
"""Longer ones are the text itself, not a name."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, metavar="FILE", help="write it there instead of to the terminal")


def run(args: argparse.Namespace) -> int:
    found = bill_of_materials()
    if args.out is None:
        print(json.dumps(found, indent=2))
    else:
        write_json(args.out, found)
        print(f"{args.out}: {len(found['components'])} packages")
    return 0


def bill_of_materials() -> dict[str, Any]:
    # Setuptools brings copies of others, and shows them to whoever has imported it.
    there = {
        _plain(found.name): found
        for found in distributions()
        if "_vendor" not in Path(str(found.locate_file(""))).parts
    }
    needs: dict[str, list[str]] = {}
    open_ = [ROOT]
    while open_:
        name = open_.pop()
        if name not in needs:
            needs[name] = sorted({one for one in _wanted(there[name]) if one in there and one != name})
            open_ += needs[name]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": FORMAT,
        "serialNumber": f"urn:uuid:{uuid.uuid4()}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
            "tools": {"components": [{"type": "application", "name": "fedqueue sbom", "version": __version__}]},
            "component": _component(there[ROOT]),
        },
        "components": [*(_component(there[name]) for name in sorted(needs) if name != ROOT), BUNDLED],
        "dependencies": [
            {
                "ref": _reference(there[name]),
                "dependsOn": [
                    *(_reference(there[one]) for one in needs[name]),
                    *([BUNDLED["bom-ref"]] if name == ROOT else []),
                ],
            }
            for name in sorted(needs)
        ]
        + [{"ref": BUNDLED["bom-ref"], "dependsOn": []}],
    }


def _plain(name: str) -> str:
    """As packages are compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _wanted(found: Distribution) -> Iterable[str]:
    """All that it may need, whatever the extra or the machine: what of it is there is used."""
    for text in found.requires or ():
        name = re.match(r"[A-Za-z0-9._-]+", text)
        if name is not None:
            yield _plain(name[0])


def _reference(found: Distribution) -> str:
    """Its package URL."""
    return f"pkg:pypi/{_plain(found.name)}@{found.version.replace('+', '%2B')}"


def _component(found: Distribution) -> dict[str, Any]:
    reference = _reference(found)
    kind = "application" if _plain(found.name) == ROOT else "library"
    licences = _licences(found)
    about = {"type": kind, "bom-ref": reference, "name": found.name, "version": found.version, "purl": reference}
    return {**about, **({"licenses": licences} if licences else {})}


def _licences(found: Distribution) -> list[dict[str, Any]]:
    metadata = found.metadata.json
    if expression := metadata.get("license_expression"):
        return [{"expression": expression}]
    classifiers = [line.rpartition(" :: ")[2] for line in metadata.get("classifier", ()) if "License ::" in line]
    named = str(metadata.get("license", ""))
    short = [named] if named and len(named) <= LICENCE_LENGTH and "\n" not in named else []
    return [{"license": {"name": name}} for name in short or sorted(set(classifiers))]
