"""rlx: asynchronous reinforcement learning for language models that reason and act."""

import importlib
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Load the room `run`, which can be called, when it is asked for: `import rlx` is light."""
    if name == "run":
        return importlib.import_module("rlx.run")
    raise AttributeError(f"module 'rlx' has no attribute {name!r}")
