"""Makes requirements.lock anew: every package that `make` installs, with its version and the sha256 of its files.

    python supply/lock.py            the newest versions that pyproject.toml and constraints.txt allow
    python supply/lock.py --keep     only what they no longer allow is changed

uv works out the versions (`pip install uv` in an environment of its own). PyTorch is the build for machines without a
GPU, which is not on the common index: `--find-links FOLDER` says where its wheel lies, and pip must be told too when it
installs (PIP_FIND_LINKS, or PIP_EXTRA_INDEX_URL with PyTorch's own index). The lock names no index: that is for each
machine to say.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
LOCK = ROOT / "requirements.lock"
OURS = (f"fedqueue[dev] @ file://{ROOT}", f"fedqueue-reproduction @ file://{ROOT}/reproduction")
HEAD = """\
# Made by `python supply/lock.py` for Python {python}; do not edit. `make` installs exactly these files.
"""
HASH = re.compile(r"--hash=(sha256:[0-9a-f]{64})")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--find-links", help="a folder with wheels of this machine")
    args = parser.parse_args()
    before = LOCK.read_text(encoding="utf-8") if args.keep else ""
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    found = _packages(_compile(OURS, constraints, before, args.find_links))
    lines = [
        " \\\n    ".join([pin, *(f"--hash={one}" for one in sorted(hashes))])
        for name, (pin, hashes) in sorted(found.items())
        if not name.startswith("fedqueue")
    ]
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    LOCK.write_text(HEAD.format(python=python) + "\n".join(lines) + "\n", encoding="utf-8")
    print(f"{LOCK.name}: {len(lines)} packages")
    return 0


def _compile(wanted: Iterable[str], constraints: str, before: str, find_links: str | None) -> str:
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    quiet = ["--quiet", "--no-header", "--no-annotate", "--no-emit-index-url", "--no-emit-find-links"]
    with tempfile.TemporaryDirectory() as folder:
        asked, known, out = (Path(folder) / name for name in ("wanted.txt", "constraints.txt", "out.txt"))
        asked.write_text("\n".join(wanted), encoding="utf-8")
        known.write_text(constraints, encoding="utf-8")
        out.write_text(before, encoding="utf-8")
        more = ["--find-links", find_links] if find_links else []
        argv = ["uv", "pip", "compile", str(asked), "-c", str(known), "-o", str(out), *quiet, *more]
        subprocess.run([*argv, "--generate-hashes", "--python-version", python], cwd=ROOT, check=True)
        return out.read_text(encoding="utf-8")


def _packages(text: str) -> dict[str, tuple[str, set[str]]]:
    """By name: its pin, and the hashes of its files."""
    found = {}
    for block in re.split(r"\n(?=\S)", text.strip()):
        pin = block.split()[0]
        found[pin.partition("==")[0]] = pin, set(HASH.findall(block))
    return found


if __name__ == "__main__":
    sys.exit(main())
