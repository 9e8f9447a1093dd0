"""The vLLM engine, and its part inside vLLM's worker processes."""
