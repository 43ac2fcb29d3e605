"""The worker runs where the rest of FedQueue is not: old Python, no packages, files renewed under it."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors

from fedqueue.agent.staging import PACKAGE, WORKER_FILES, stage_worker
from tests.jobs import (
    make_job,
    result_of,
    run_script,
    update_of,
    wait_for,
)

NUMPY_WORKER = """
import sys
import fedqueue
with fedqueue.participate() as work:
    from safetensors.numpy import load_file
    import numpy
    state = load_file(str(work.model_path))
    for step in work.steps():
        state = {name: value + 1 for name, value in state.items()}
    work.submit(state, metrics={"loss": 1})
assert "torch" not in sys.modules
print(fedqueue.__file__)
"""


@pytest.mark.parametrize("name", [name for name in WORKER_FILES if name.endswith(".py")])
def test_worker_files_are_python_39(name: str) -> None:
    tree = ast.parse((PACKAGE / name).read_text(), feature_version=(3, 9))
    assert any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body) or not any(
        isinstance(node, (ast.FunctionDef, ast.ClassDef)) for node in tree.body
    ), "annotations are not lazy"


def test_staged_worker_needs_nothing_else_of_the_package(tmp_path: Path) -> None:
    """No site packages but numpy and safetensors, and the copies alone on the path."""
    worker = stage_worker(tmp_path / "home")
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    for library in (np, safetensors):
        (libraries / library.__name__).symlink_to(Path(library.__path__[0]))
    for path in Path(np.__path__[0]).parent.glob("numpy.libs"):
        (libraries / path.name).symlink_to(path)
    (tmp_path / "train.py").write_text(NUMPY_WORKER)
    environment = {"PYTHONPATH": f"{worker}:{libraries}", "PATH": os.environ["PATH"], **make_job(tmp_path)}
    job = subprocess.run(
        [sys.executable, "-S", str(tmp_path / "train.py")], env=environment, capture_output=True, text=True, timeout=600
    )
    assert job.returncode == 0, job.stderr
    assert str(tmp_path / "home/worker") in job.stdout
    assert (update_of(tmp_path)["w"] == 4.0).all()


def test_staged_worker_runs_in_python_39(tmp_path: Path) -> None:
    python = os.environ.get("FEDQUEUE_PYTHON39") or shutil.which("python3.9")
    needs = "import sys, numpy, safetensors.numpy; assert sys.version_info[:2] == (3, 9)"
    if python is None or subprocess.run([python, "-c", needs], capture_output=True).returncode:
        pytest.skip("no Python 3.9 with numpy and safetensors found (FEDQUEUE_PYTHON39 may name one)")
    environment = {**make_job(tmp_path), "PYTHONPATH": str(stage_worker(tmp_path / "home"))}
    job = run_script(tmp_path, environment, NUMPY_WORKER, python=python)
    _, errors = job.communicate(timeout=600)
    assert job.returncode == 0, errors
    assert result_of(tmp_path)["stopped_by"] == "steps"


def test_import_is_quick_and_loads_no_library() -> None:
    program = (
        "import sys, fedqueue; fedqueue.participate; "
        "assert not {'torch', 'numpy', 'safetensors', 'rich'} & set(sys.modules), 'loaded'"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=600)


def staged_changed(tmp_path: Path) -> Path:
    package = tmp_path / "package"
    for name in WORKER_FILES:
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PACKAGE / name, package / name)
    (package / "protocol/budget.py").write_text((PACKAGE / "protocol/budget.py").read_text() + "\nNEW = True\n")
    return package


def test_staging_again_changes_nothing(tmp_path: Path) -> None:
    def seen() -> list[tuple[str, int]]:
        return sorted((str(path), path.lstat().st_mtime_ns) for path in (tmp_path / "worker").rglob("*"))

    assert stage_worker(tmp_path) == tmp_path / "worker"
    before = seen()
    stage_worker(tmp_path)
    assert seen() == before


def test_job_keeps_the_version_it_began_to_import(tmp_path: Path) -> None:
    worker = stage_worker(tmp_path)
    body = """
import fedqueue, pathlib, time
pathlib.Path("imported").touch()
while not pathlib.Path("staged").exists():
    time.sleep(0.01)
import fedqueue.protocol.budget
assert not hasattr(fedqueue.protocol.budget, "NEW")
"""
    job = run_script(tmp_path, {"PYTHONPATH": str(worker)}, body)
    wait_for(tmp_path / "imported", job)
    stage_worker(tmp_path, staged_changed(tmp_path))
    (tmp_path / "staged").touch()
    _, errors = job.communicate(timeout=600)
    assert job.returncode == 0, errors
    later = run_script(
        tmp_path,
        {"PYTHONPATH": str(worker)},
        "import fedqueue.protocol.budget; fedqueue.protocol.budget.NEW",
    )
    later.communicate(timeout=600)
    assert later.returncode == 0


def test_plain_copy_of_an_older_version_is_replaced(tmp_path: Path) -> None:
    shutil.copytree(staged_changed(tmp_path), tmp_path / "worker" / "fedqueue")
    stage_worker(tmp_path)
    assert "NEW" not in (tmp_path / "worker/fedqueue/protocol/budget.py").read_text()
