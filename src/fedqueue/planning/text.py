"""How the planner says numbers."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Two digits or a whole number, in the unit that suits.

    >>> duration(45.0), duration(5400.0), duration(1200.0), duration(172800.0)
    ('45 s', '1.5 h', '20 min', '2 days')
    """
    for size, least, unit in ((86_400.0, 86_400.0 * 1.5, "days"), (3600.0, 3600.0, "h"), (60.0, 60.0, "min")):
        if seconds >= least:
            return f"{_short(seconds / size)} {unit}"
    return f"{_short(seconds)} s"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def amount(value: float) -> str:
    """About three digits.

    >>> amount(1234567.0), amount(12.34), amount(0.5)
    ('1,230,000', '12.3', '0.5')
    """
    if value >= 1000:
        digits = len(str(int(value))) - 3
        return f"{round(value, -digits):,.0f}"
    return f"{value:.3g}"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def change(share: float | None, half_width: float | None = None) -> str:
    """A signed share, with its 95 % interval.

    >>> change(-0.381, 0.05), change(0.0)
    ('-38 % ± 5', '0 %')
    """
    if share is None:
        return "-"
    text = f"{100 * share:+.0f} %" if round(100 * share) else "0 %"
    return text if half_width is None else f"{text} ± {100 * half_width:.0f}"
