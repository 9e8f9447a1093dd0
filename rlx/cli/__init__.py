"""The edge that every command shares: flags, one-line errors, signals, a user's own code."""
