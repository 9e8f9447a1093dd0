"""Files, locks, processes, memory, signals and threads: standard library only."""
