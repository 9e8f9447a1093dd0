"""A run: its parts, its loop, its records, its weights."""
