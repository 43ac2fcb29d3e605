"""`python -m fedqueue`: the command line, also from a source tree where nothing is installed."""

from fedqueue.cli import main

raise SystemExit(main())
