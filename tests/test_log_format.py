"""What `--log-format json` writes: an object in each line, whatever is in it."""

from __future__ import annotations

import io
import logging
import os
import signal
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from fedqueue.cli import live
from tests.conftest import strictly
from tests.waiting import LONGEST, wait_for


def test_each_line_is_an_object_whatever_others_said() -> None:
    written = io.StringIO()
    with live.logged(written, as_json=True):
        logging.getLogger("fedqueue.agent.north/night").warning("a\nb \x1b[31m \u2028 %s", "{}")
        try:
            raise ValueError("why")
        except ValueError:
            logging.getLogger("fedqueue.coordinator").exception("it failed")
    first, second = map(strictly, written.getvalue().splitlines())
    assert (first["facility"], first["run"], first["level"]) == ("north", "night", "warning")
    assert first["message"] == "a\nb \x1b[31m \u2028 {}"
    assert "run" not in second
    assert "ValueError: why" in second["error"]
    assert datetime.fromisoformat(second["at"]).tzinfo is not None


@pytest.mark.waits(3)
def test_a_server_logs_so(tmp_path: Path) -> None:
    folder, log = tmp_path / "federation", tmp_path / "log"
    folder.mkdir(mode=0o700)
    (folder / "federation.toml").write_text("[server]\nport = 0\n")
    argv = [sys.executable, "-m", "fedqueue", "serve", str(folder), "--plain-http", "--log-format", "json"]
    with log.open("wb") as to, subprocess.Popen(argv, stderr=to, stdout=subprocess.DEVNULL, env=os.environ) as server:
        wait_for(lambda: "nobody is enrolled" in log.read_text(), "what it says at first", log.read_text)
        server.send_signal(signal.SIGTERM)
        assert server.wait(LONGEST) == 130
    said = [strictly(line) for line in log.read_text().splitlines()]
    assert {"at", "level", "message"} == set(said[0])
    assert any(line["message"].startswith("listening at http://") for line in said)
