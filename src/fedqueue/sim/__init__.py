"""Virtual time: queues, faults and facilities that exist only as arithmetic, driven by the real strategies."""
