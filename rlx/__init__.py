"""rlx: asynchronous reinforcement learning for language models that reason and act."""

__version__ = "0.1.0"
