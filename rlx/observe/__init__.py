"""What a user sees of a run: metrics, timeline, live progress, report. Imports no JAX."""
