"""What a wheel of ours holds."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_wheel_has_the_package_and_none_of_the_paper(tmp_path: Path) -> None:
    source = tmp_path / "source"  # building writes beside the sources
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    shutil.copytree(ROOT / "reproduction", source / "reproduction", ignore=shutil.ignore_patterns("*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    argv = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*argv, "--wheel-dir", str(tmp_path), str(source)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("fedqueue-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {
        "fedqueue/__init__.py",
        "fedqueue/cli/starter.toml",
        "fedqueue/report/page.html",
        "fedqueue/py.typed",
    } <= set(names)
    assert all(name.startswith(("fedqueue/", "fedqueue-")) for name in names)
    assert not [name for name in names if "reproduction" in name or "fleet" in name or "study" in name]
