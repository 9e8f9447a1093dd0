"""Command lines of the commands that take a config: `--config=FILE[:ARG] --config.key=value`."""

import difflib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from rlx.base import UserError
from rlx.config import unknown


def parse(
    argv: list[str],
    *,
    config_needed: bool = True,
    switches: Mapping[str, str] | None = None,
    **strings: str,
) -> tuple[Any, flags.FlagValues]:
    """Reads `argv` (program name first) into a config and the values of extra string flags.

    Args:
      argv: as sys.argv.
      config_needed: whether it is a mistake to give no config.
      switches: name → help of flags that are given or not, `--dry_run`.
      strings: name → help of further flags; each defaults to "".

    Returns:
      The config with overrides applied (None where none was given and none is needed), and the flag
      values (`values.workdir`, …).

    Raises:
      UserError: no or unreadable config, unknown flag or key, or a value of the wrong type.
    """
    config_file = next((a.split("=", 1)[1] for a in argv if a.startswith("--config=")), "")
    plain = [a for a in argv if not a.startswith("--config.")]
    overrides = [a for a in argv if a.startswith("--config.")]
    asked = config_needed or config_file or overrides
    if asked and "--help" not in argv and "-h" not in argv:
        _check_file(config_file)
    values = _flags(strings, switches or {}, plain)
    if "--help" in argv or "-h" in argv:
        print(f"usage: python -m rlx.… --config=FILE[:ARG] [--config.KEY=VALUE …]\n{values}")
        raise SystemExit(0)
    rest = _parse(values, plain)[1:]
    if rest:
        raise UserError(f"unexpected argument {rest[0]!r}; flags start with --, see --help")
    if not asked:
        return None, values
    known = {key for key, _ in _leaves(values["config"].value)}
    for override in overrides:
        key = override.removeprefix("--config.").split("=", 1)[0]
        if "=" not in override:
            raise UserError(f"{override} has no value; write {override}=VALUE")
        if key not in known:
            raise unknown("config key", key, known)
    values = _flags(strings, switches or {}, argv)
    _parse(values, argv)
    return values["config"].value, values


def number(values: Any, name: str, kind: Callable[[str], Any], default: Any) -> Any:
    """The value of a string flag as `kind` reads it; `default` where it is empty.

    Raises:
      UserError: `kind` does not take it.
    """
    text = getattr(values, name)
    try:
        return kind(text) if text else default
    except ValueError:
        raise UserError(f"--{name}={text} is not a number; give one like {default}") from None


def _flags(
    strings: Mapping[str, str], switches: Mapping[str, str], argv: list[str]
) -> flags.FlagValues:
    values = flags.FlagValues()
    config_flags.DEFINE_config_file(
        "config", None, "FILE[:ARG]", flag_values=values, lock_config=True, sys_argv=argv
    )
    for name, text in strings.items():
        flags.DEFINE_string(name, "", text, flag_values=values)
    for name, text in switches.items():
        flags.DEFINE_bool(name, False, text, flag_values=values)
    return values


def _parse(values: flags.FlagValues, argv: list[str]) -> list[str]:
    try:
        with _neighbours(argv):
            return values(argv)
    except (flags.Error, OSError, TypeError, ValueError) as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise UserError(lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}") from error


@contextmanager
def _neighbours(argv: list[str]) -> Iterator[None]:
    """Lets DIR/configs/x.py say `from configs import y`, wherever the command is run."""
    file = next(
        (a.split("=", 1)[1].split(":", 1)[0] for a in argv if a.startswith("--config=")), ""
    )
    root = str(Path(file).absolute().parent.parent)
    sys.path.insert(0, root)
    try:
        yield
    finally:
        sys.path.remove(root)


def _check_file(config_file: str) -> None:
    if not config_file:
        raise UserError("no --config=FILE given; try --config=configs/arithmetic.py")
    path = Path(config_file.split(":", 1)[0])
    if not path.is_file():
        here = [str(p) for p in sorted(path.parent.glob("*.py"))]
        near = difflib.get_close_matches(str(path), here, n=1)
        hint = f"did you mean {near[0]}?" if near else "give the path of a .py with get_config()"
        raise UserError(f"no config file {path}; {hint}")


def _leaves(config: ConfigDict, prefix: str = ""):
    for key in config:
        value = config[key]
        if isinstance(value, ConfigDict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
