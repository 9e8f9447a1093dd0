"""Benchmarks: `python -m experiments.bench.NAME`. Each runs its rival in the same run."""
