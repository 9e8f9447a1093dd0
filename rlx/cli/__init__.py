"""Shared by every command: flags, one-line errors, signals, a user's own code."""
