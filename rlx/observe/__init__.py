"""Show a run to its user: metrics, timeline, live progress, report. Imports no JAX."""
