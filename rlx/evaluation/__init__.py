"""Models × question sets: samples, scores, benchmarks, and the held-out questions of a run."""
