"""The cap on a facility's node-hours: what it leaves for one more job, in agents and in the simulator."""

from __future__ import annotations

from fedqueue.protocol.codec import message


@message
class CapLeft:
    """Seconds of wall time that one more job may ask for."""

    seconds: float
    """While jobs under way count with all that they asked for. Less than 0: one that was taken back into its queue asks
    for more than there is."""
    when_idle: float  # if nothing were under way


def cap_left(node_hours: float, nodes: int, *, used: float, asked: float) -> CapLeft:
    """Node-seconds: `used` by what is over, and `asked` for by what is under way. A job has so many nodes.

    >>> cap_left(2.0, 4, used=3600.0, asked=2400.0)
    CapLeft(seconds=300.0, when_idle=900.0)
    """
    unused = 3600 * node_hours - used
    return CapLeft(seconds=(unused - asked) / nodes, when_idle=unused / nodes)
