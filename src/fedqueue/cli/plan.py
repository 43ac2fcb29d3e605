"""Say what to ask for before a run: strategy, round length, rule, and for each facility wall time and job size.

The config describes the facilities (nodes, steps_per_second, start-up, transfer). Their queues come from --history: a
scheduler's log in any format that `fedqueue history` reads, or a run folder; or from --live, the scheduler of this
machine. Many ways to run are simulated over these histories, each from the same starting points, and the best is
recommended. docs/planning.md explains what is printed.

examples:
  fedqueue plan my.toml --history north=sacct.txt.gz --history south=accounting
  fedqueue plan my.toml --history north=log.swf --what-if 'south.wait=2x' --what-if 'without south' --out plan.toml
  fedqueue plan my.toml --history north=log.swf --curve runs/earlier --target 0.95 --plot plan.png
"""

from __future__ import annotations

import argparse
import json
from math import isfinite
from os import cpu_count
from pathlib import Path

from fedqueue.cli import common, terminal
from fedqueue.config import read_tree
from fedqueue.errors import ConfigError
from fedqueue.protocol.strategies import STRATEGIES, distinct

HELP = "say what to ask for before a run, from queue histories"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_config(parser)
    where = parser.add_argument_group("queues")
    where.add_argument(
        "--history", action="append", default=[], metavar="FACILITY=FILE", help="log of its scheduler, or run folder"
    )
    where.add_argument(
        "--live", action="append", default=[], metavar="FACILITY=KIND", help="ask this machine's: slurm, pbs or sge"
    )
    where.add_argument(
        "--per-node",
        action="append",
        default=[],
        metavar="FACILITY=N",
        help="processors that its log counts for a node (1)",
    )
    goal = parser.add_argument_group("what counts")
    goal.add_argument("--curve", type=Path, metavar="FILE", help="learning curve: CSV of steps,score, or a run folder")
    goal.add_argument("--target", type=float, metavar="S", help="with --curve: the score to reach")
    goal.add_argument(
        "--returns",
        type=float,
        default=0.5,
        metavar="R",
        help="an update of E local steps counts as E^R (0.5): twice the steps count 1.4 times; 1: all count the same",
    )
    search = parser.add_argument_group("what is tried")
    search.add_argument("--days", type=float, default=28.0, metavar="N", help="length of the run (28)")
    search.add_argument(
        "--strategies", default=",".join(distinct()), metavar="a,b,...", help="by default all whose orders differ"
    )
    search.add_argument("--shortest", type=float, metavar="S", help="shortest round, seconds (600 with histories)")
    search.add_argument("--longest", type=float, default=172_800.0, metavar="S", help="longest round (172800)")
    search.add_argument("--keep-nodes", action="store_true", help="try no other job sizes")
    search.add_argument("--no-stay", action="store_true", help="try no jobs that stay for several rounds")
    search.add_argument(
        "--scaling", type=float, default=0.9, metavar="X", help="speed grows with nodes as nodes^X (0.9)"
    )
    search.add_argument("--starts", type=int, default=6, metavar="N", help="starting points in the histories (6)")
    search.add_argument("--seed", type=int, metavar="N", help="draws them; instead of the config's run.seed")
    search.add_argument(
        "--what-if", action="append", default=[], metavar="X", help="e.g. south.wait=2x, max_jobs=1, 'without south'"
    )
    out = parser.add_argument_group("output")
    out.add_argument("--out", type=Path, metavar="PLAN.toml", help="write a config ready to run")
    out.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the trade-off")
    out.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    out.add_argument("--jobs", type=int, default=min(2, cpu_count() or 1), metavar="P", help="processes at once (2)")


def run(args: argparse.Namespace) -> int:
    from fedqueue.cli.plan_text import as_json, show  # loads numpy: other commands need not wait for it
    from fedqueue.planning.advice import Wish, advise
    from fedqueue.planning.config_out import write_config
    from fedqueue.planning.curve import read_curve
    from fedqueue.planning.measure import Worth
    from fedqueue.planning.search import Searcher, Setting
    from fedqueue.planning.sources import by_facility, read_places

    strategies = _check(args)
    config = common.load_run(args.config, args.changes, seed=args.seed)
    places = read_places(
        config,
        by_facility("--history", args.history, config),
        by_facility("--live", args.live, config),
        by_facility("--per-node", args.per_node, config),
    )
    needed, reference = None, 100.0
    if args.curve is not None:
        curve = read_curve(args.curve)
        needed, reference = curve.steps_to(args.target), curve.steps_per_update or reference
    setting = Setting(
        config=config,
        worth=Worth(returns=args.returns, reference=reference, needed=needed),
        days=args.days,
        seed=config.run.seed,
        starts=args.starts,
    )
    wish = Wish(
        setting=setting,
        places=places,
        strategies=strategies,
        what_ifs=list(dict.fromkeys(args.what_if)),
        scaling=args.scaling,
        keep_sizes=args.keep_nodes,
        may_stay=not args.no_stay,
        shortest=args.shortest,
        longest=args.longest,
    )
    with terminal.counting(quiet=args.json, lines=False) as told:
        advice = advise(wish, Searcher(setting, args.jobs, told))
    if args.json:
        print(json.dumps(as_json(advice)))
    else:
        show(advice)  # before anything is written: a full disk does not take the plan with it
    written = []
    if args.out is not None:
        written.append(write_config(advice, read_tree(args.config, args.changes), args.out))
    if args.plot is not None:
        from fedqueue.report.planning import plan_plot

        written.append(plan_plot(advice, args.plot))
    for path in written if not args.json else ():
        print(f"wrote {path}")
    return 0


def _check(args: argparse.Namespace) -> list[str]:
    """The strategies asked for; ConfigError for options that no plan can have."""
    strategies = list(dict.fromkeys(name.strip() for name in args.strategies.split(",") if name.strip()))
    unknown = next((name for name in strategies if name not in STRATEGIES), None)
    if unknown or not strategies:
        raise ConfigError(f"--strategies: there is no strategy {unknown!r}; there are {', '.join(STRATEGIES)}")
    if (args.curve is None) != (args.target is None):
        raise ConfigError("--curve and --target belong together: give both or none")
    if args.target is not None and not isfinite(args.target):
        raise ConfigError(f"--target must be a number, found {args.target}")
    for name, least, most in (("returns", 0.0, 1.0), ("scaling", 0.0, 2.0), ("days", 0.0, 3650.0)):
        if not least < getattr(args, name) <= most:
            raise ConfigError(f"--{name} must be more than {least:g} and at most {most:g}, found {getattr(args, name)}")
    for name in ("starts", "jobs"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} must be 1 or more, found {getattr(args, name)}")
    shortest = args.shortest if args.shortest is not None else 0.5
    if not 0 < shortest < args.longest < float("inf"):
        raise ConfigError(f"--shortest and --longest must be seconds, rising, found {args.shortest} and {args.longest}")
    if args.out is not None and args.out.exists():
        raise ConfigError(f"--out {args.out}: exists already; nothing was changed; name another file")
    if args.plot is not None:
        common.check_ending("--plot", args.plot, ".png")
    return strategies
