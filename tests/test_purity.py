"""Who may import whom: the protocol the standard library and itself alone, and no machine's code another machine's."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "fedqueue"
PURE = ("protocol", "errors")
ROOMS = {
    "agent": ("coordinator", "sim", "training", "worker", "integrations"),
    "coordinator": ("agent", "sim", "worker", "integrations"),
    "worker": ("agent", "coordinator", "sim", "training", "config"),
    "integrations": ("agent", "coordinator", "sim", "training", "config"),
    "training": ("agent", "coordinator", "sim"),
    "sim": ("agent", "coordinator", "worker", "integrations"),
}
"""Each room, and those it must not know: a login node has no server, a job has neither, a simulation needs none."""
FORBIDDEN = {"time", "datetime", "random", "secrets", "os", "pathlib", "io", "socket", "threading", "asyncio", "uuid"}
FILES = sorted([*(SOURCE / "protocol").rglob("*.py"), SOURCE / "errors.py"])


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} uses a relative import"
            found.add(node.module or "")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_core_imports_standard_library_and_itself_only(path: Path) -> None:
    for name in imports(path):
        top, _, rest = name.partition(".")
        if top == "fedqueue":
            assert rest.partition(".")[0] in PURE, f"{path.name} imports {name}, which is not part of the core"
        else:
            assert top in sys.stdlib_module_names, f"{path.name} imports {name}"
            assert top not in FORBIDDEN, f"{path.name} imports {name}: the core is told what happens, it does not look"


def test_there_are_core_files_to_check() -> None:
    assert len(FILES) > 15


@pytest.mark.parametrize("room", ROOMS)
def test_no_room_imports_another_machines(room: str) -> None:
    files = sorted((SOURCE / room).rglob("*.py"))
    assert files
    for path in files:
        for name in imports(path):
            top, _, rest = name.partition(".")
            known = rest.partition(".")[0]
            assert top != "fedqueue" or known not in ROOMS[room], f"{path.relative_to(SOURCE)} imports {name}"


def test_command_line_of_a_timing_run_never_loads_torch_or_matplotlib(tmp_path: Path) -> None:
    program = (
        "import sys; from fedqueue.cli import main; "
        f"main(['simulate', {str(SOURCE.parent.parent / 'experiments/timing.toml')!r}, '--json', '--no-plots', "
        f"'--out', {str(tmp_path / 'run')!r}]); "
        "assert not {'torch', 'matplotlib', 'sklearn', 'urllib3', 'uvicorn', 'starlette'} & set(sys.modules), 'loaded'"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=600)
