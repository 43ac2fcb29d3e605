"""`python -m fedqueue_reproduction synthetic`: from the source tree, where nothing is installed."""

from __future__ import annotations

import sys

from fedqueue.cli import main
from fedqueue_reproduction import command

sys.argv.insert(1, "reproduce")  # so that results hold the command as anybody would give it
raise SystemExit(main(sys.argv[1:], {"reproduce": command}))
