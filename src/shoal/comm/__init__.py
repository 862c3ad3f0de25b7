"""Ranks talking to each other: groups, transports, the canonical sum, and how a job ends."""
