"""Call a run's hooks: writers of boards, and objects of users with some of METHODS.

Hooks run on the trainer's thread, between two steps. A record is the object of a line in
metrics.jsonl, eval.jsonl or gate.jsonl. A hook that raises during the run is reported with file and
line, and is called no more.
"""

import copy
import inspect
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rlx.base import UserError, unknown
from rlx.cli.user_code import where
from rlx.system.signals import Cut

METHODS = {  # name → arguments
    "on_begin": ("config", "workdir", "step"),  # the step before the first; may raise
    "on_step": ("step", "record"),
    "on_eval": ("step", "record"),  # of an earlier step, where evaluations take long
    "on_gate": ("step", "record"),  # servers compared with the trainer
    "on_checkpoint": ("step", "directory"),  # complete
    "on_end": ("reason",),  # finished | stopped | failed; only after on_begin
}


def check(name: str, hook: Any) -> None:
    """Raise UserError, which begins with `name`, unless `hook` has methods of METHODS only."""
    events = [event for event in dir(hook) if event.startswith("on_")]
    if not events:
        raise UserError(f"{name} is no hook; give it some of {', '.join(METHODS)}")
    for event in events:
        if event not in METHODS:
            raise unknown(f"method of {name}", event, METHODS)
        method, call = getattr(hook, event), f"{event}({', '.join(METHODS[event])})"
        if inspect.iscoroutinefunction(method):
            raise UserError(f"{name}: {event} is async and nobody awaits it; write `def {call}`")
        try:
            inspect.signature(method).bind(*METHODS[event])
        except TypeError as error:
            raise UserError(f"{name}.{event}: {error}; it is called as {call}") from error


class Hooks:
    """Calls and checks the hooks of one run, in order; `say` takes a line for the user."""

    def __init__(self, hooks: Iterable[tuple[str, Any]] = (), say: Callable[[str], None] = print):
        self._named, self._begun, self.say = dict(hooks), dict[str, Any](), say
        self.under_way: tuple[str, str] | None = None  # the call that the run waits for
        for name, hook in self._named.items():
            check(name, hook)

    def begin(self, config: dict[str, Any], workdir: Path, step: int) -> None:
        """Call `on_begin` of each hook; raise UserError if one fails."""
        for name, hook in self._named.items():
            if error := self._call(name, hook, "on_begin", config, workdir, step):
                problem = f"{name}: on_begin fails: {where(error)}"
                raise UserError(f"{problem}; mend it, or leave it out") from error
            self._begun[name] = hook

    def tell(self, method: str, *arguments: Any) -> None:
        """Call `method` of each hook; report a hook that raises and drop it."""
        for name, hook in list(self._begun.items()):
            if error := self._call(name, hook, method, *arguments):
                logging.getLogger(__name__).debug("%s: %s", name, method, exc_info=error)
                del self._begun[name]
                problem = f"{name}: {method} fails and the hook is called no more"
                self.say(f"{problem}, the run goes on: {where(error)}")

    def _call(self, name: str, hook: Any, method: str, *arguments: Any) -> BaseException | None:
        """Call a hook's method, if it has one, with copies; return what it raises."""
        self.under_way = (name, method)
        try:
            if hasattr(hook, method):
                getattr(hook, method)(*copy.deepcopy(arguments))
        except (Exception, SystemExit, Cut) as error:
            return error
        finally:
            self.under_way = None
        return None

    def end(self, reason: str) -> None:
        """Call `on_end` of each hook, the first time only."""
        self.tell("on_end", reason)
        self._begun.clear()
