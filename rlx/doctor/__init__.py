"""Check packages, machine and memory before a run, and explain failures that are no bug."""
