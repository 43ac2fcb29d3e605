"""Faults with real processes: kills at any moment, cut networks, full disks, clocks that disagree."""
