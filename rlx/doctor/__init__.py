"""Checks before a run: packages, machine, memory, config; and failures in words."""
