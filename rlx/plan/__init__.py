"""Plan a run before GPUs are rented: which split, which staleness, how long, how much memory."""
