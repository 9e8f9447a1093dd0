"""A run: its parts, its loop, its records, its weights. `rlx.run(config, workdir)` runs one."""

import sys
from types import ModuleType
from typing import Any


class _Run(ModuleType):
    """The type of this module, so that it can be called."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call rlx.run.loop.run: (config, workdir, callbacks=(), stop=None)."""
        from rlx.run import loop  # JAX not before it is needed

        return loop.run(*arguments, **options)


sys.modules[__name__].__class__ = _Run
