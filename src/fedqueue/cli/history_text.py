"""What `fedqueue history` found, for a person."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, tzinfo
from functools import partial

from fedqueue.cli import terminal
from fedqueue.history.lines import Tally
from fedqueue.history.sketch import ERROR
from fedqueue.history.summary import WEEKDAYS, Summary, Waits, extremes, human, request_label, size_label
from fedqueue.report.style import amount

_HOURS = tuple(f"{hour:02}:00-{(hour + 1) % 24:02}:00" for hour in range(24))


def show(source: str, found: Summary, tally: Tally, zone: tzinfo | None, timezone: str | None) -> None:
    """On standard output."""
    say = partial(terminal.console().print, markup=False)
    span = human(found.last - found.first)
    say(f"{source} ({tally.format}): {found.jobs:,} jobs that started, over {span}{_span(found, zone)}")
    for why, count in (+tally.dropped).most_common():
        say(f"  left out: {count:,} {why}")
    if tally.broken:
        say(f"  not understood: {tally.broken:,} lines, the first: {tally.first_broken}")
    where = timezone or "this machine's time zone"
    if tally.local:
        say(f"  its times are local and were read as those of {where}")
    say()
    _show_waits(found)
    say(
        f"mean {human(found.mean)}, longest {human(found.longest)}; "
        + ", ".join(f"{terminal.percent(share)} % start within {human(limit)}" for limit, share in found.within.items())
    )
    if found.load is not None:
        say(
            f"load {terminal.percent(found.load)} % of {amount(found.peak)} {tally.counts}, the most in use in "
            "any hour (the log does not say how large the machine is)"
        )
    say()
    _show_shapes(found, tally.counts)
    if not found.clock:
        say("hours and weekdays: the log has no clock times; say the Unix time of its second 0 with --epoch")
    for title, waits, names in (("hour", found.hours, _HOURS), ("weekday", found.weekdays, WEEKDAYS)):
        _show_extremes(title, waits, names, where)
    say(f"quantiles are within {100 * ERROR:g} % of the exact ones")


def _span(found: Summary, zone: tzinfo | None) -> str:
    if not found.clock:
        return ""
    first, last = (datetime.fromtimestamp(at, zone).date().isoformat() for at in (found.first, found.last))
    return f", {first} to {last}"


def _show_waits(found: Summary) -> None:
    rows = [("wait", human(found.median), human(found.p90), human(found.p99))]
    terminal.show_table("how long jobs wait", ("", "half of them to", "90 % to", "99 % to"), rows)


def _show_shapes(found: Summary, counts: str) -> None:
    rows = [
        (
            f"{size_label(shape.procs)}",
            request_label(shape.requested),
            f"{shape.jobs:,}",
            human(shape.median),
            human(shape.p90),
        )
        for shape in found.shapes
    ]
    terminal.show_table("by shape", (counts, "requested", "jobs", "median", "p90"), rows)


def _show_extremes(title: str, waits: Sequence[Waits], names: Sequence[str], where: str) -> None:
    places = extremes(list(waits))
    if places is None:
        return
    rows = [
        (word, names[place], f"{waits[place].jobs:,}", human(waits[place].median), human(waits[place].p90))
        for word, place in zip(("shortest", "longest"), places, strict=True)
    ]
    terminal.show_table(f"by {title} of submission, in {where}", ("wait", title, "jobs", "median", "p90"), rows)
