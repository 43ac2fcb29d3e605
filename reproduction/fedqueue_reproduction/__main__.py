"""`python -m fedqueue_reproduction synthetic`: from the source tree, where nothing is installed."""

from __future__ import annotations

import sys

from fedqueue.cli import main
from fedqueue_reproduction import command

raise SystemExit(main(["reproduce", *sys.argv[1:]], {"reproduce": command}))
