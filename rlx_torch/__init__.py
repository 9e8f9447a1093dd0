"""The same training step in PyTorch: a witness for parity tests and the rival in benchmarks."""
