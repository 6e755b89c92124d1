"""Decisions: who computes what in the next step, and what its result means. No I/O, no clock, no device."""
