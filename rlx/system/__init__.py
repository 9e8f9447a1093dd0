"""Files, locks, processes, memory, signals and threads; imports only rlx.base."""
