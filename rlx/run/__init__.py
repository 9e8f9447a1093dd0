"""Everything that a run consists of; `rlx.run(config, workdir)` runs one."""

import sys
from types import ModuleType
from typing import Any


class _Run(ModuleType):
    """The callable type of this module."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call rlx.run.loop.run: (config, workdir, callbacks=(), stop=None)."""
        from rlx.run import loop  # imports JAX

        return loop.run(*arguments, **options)


sys.modules[__name__].__class__ = _Run
