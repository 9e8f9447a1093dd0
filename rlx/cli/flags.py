"""Parse command lines with a config: `--config=FILE[:ARG] --config.key=value`.

In the place of FILE, rlx:NAME is configs/NAME.py of the files that come with rlx.
"""

import ast
import difflib
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from rlx.base import UserError, unknown


def parse(
    argv: list[str],
    *,
    config_needed: bool = True,
    switches: Mapping[str, str] | None = None,
    **strings: str,
) -> tuple[Any, flags.FlagValues]:
    """Read `argv` (program name first) into a config and the values of extra string flags.

    Args:
      argv: as sys.argv.
      config_needed: whether it is a mistake to give no config.
      switches: name → help of flags without a value, as `--dry_run`.
      strings: name → help of further flags; each defaults to "".

    Returns:
      The config with overrides applied (None where none was given and none is needed), and the flag
      values (`values.workdir`, …).

    Raises:
      UserError: no or unreadable config, unknown flag or key, or a value of the wrong type.
    """
    argv = _joined(argv)
    config_file = next((a.split("=", 1)[1] for a in argv if a.startswith("--config=")), "")
    plain = [a for a in argv if not a.startswith("--config.")]
    overrides = [a for a in argv if a.startswith("--config.")]
    asked = config_needed or config_file or overrides
    if asked and "--help" not in argv and "-h" not in argv:
        _check_file(config_file)
    values = _flags(strings, switches or {}, plain)
    if "--help" in argv or "-h" in argv:
        name = Path(argv[0]).name.removesuffix(".py").removeprefix("rlx.")
        print(f"usage: python -m rlx.{name} --config=FILE[:ARG] [--config.KEY=VALUE …] "
              f"[--traceback]\n{values}")  # fmt: skip
        raise SystemExit(0)
    rest = _parse(values, plain)[1:]
    if rest:
        raise UserError(f"unexpected argument {rest[0]!r}; flags start with --, see --help")
    if not asked:
        return None, values
    if not isinstance(values["config"].value, ConfigDict):
        found = type(values["config"].value).__name__.removesuffix("Type")
        raise UserError(
            f"get_config() of {config_file} returns {found}; let it return a ConfigDict"
        )
    known = dict(leaves(values["config"].value))
    for override in overrides:
        key = override.removeprefix("--config.").split("=", 1)[0]
        if "=" not in override:
            raise UserError(f"{override} has no value; write {override}=VALUE")
        if key not in known:
            raise unknown("config key", key, known)
        if isinstance(known[key], tuple):
            argv[argv.index(override)] = _as_tuple(override)
    values = _flags(strings, switches or {}, argv)
    _parse(values, argv)
    return values["config"].value, values


def number(values: Any, name: str, kind: Callable[[str], Any], default: Any) -> Any:
    """Return the value of a string flag as `kind` reads it; `default` where it is empty.

    Raises:
      UserError: it is no such number.
    """
    text = getattr(values, name)
    try:
        return kind(text) if text else default
    except ValueError:
        raise UserError(f"--{name}={text} is not a number; give one like {default}") from None


def _joined(argv: list[str]) -> list[str]:
    """Return `argv` with `--config FILE` written as `--config=FILE`."""
    joined: list[str] = []
    for argument in argv:
        if joined and joined[-1] == "--config" and not argument.startswith("-"):
            joined[-1] = f"--config={argument}"
        else:
            joined.append(argument)
    return [_located(a) if a.startswith("--config=rlx:") else a for a in joined]


def _located(argument: str) -> str:
    """Return `--config=rlx:NAME[:ARG]` with the path of the file in place of rlx:NAME."""
    name, *more = argument.removeprefix("--config=rlx:").split(":", 1)
    place = _embedded() / "configs"
    paths = [path.relative_to(place) for path in place.glob("**/*.py")]
    names = {str(p.with_suffix("")) for p in paths if p.parts[0] not in ("agents", "data")}
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean rlx:{near[0]}?" if near else f"they are the files in {place}"
        raise UserError(f"no config rlx:{name}; {hint}")
    return ":".join([f"--config={place / name}.py", *more])


def _embedded() -> Path:
    """Return the directory that comes with rlx and has `configs/`: of a wheel, else of a clone."""
    wheel = Path(__file__).parents[1] / "embedded"
    return wheel if wheel.is_dir() else wheel.parents[1]


def _as_tuple(override: str) -> str:
    """Return `--config.lora.targets=q,k` as `--config.lora.targets=('q', 'k')`."""
    key, _, text = override.partition("=")
    if not re.fullmatch(r"[\w.:/-]+(?:,[\w.:/-]+)+", text):
        return override
    try:
        ast.literal_eval(text)  # numbers
    except (SyntaxError, ValueError):
        return f"{key}={tuple(text.split(','))!r}"
    return override


def _flags(
    strings: Mapping[str, str], switches: Mapping[str, str], argv: list[str]
) -> flags.FlagValues:
    values = flags.FlagValues()
    config_flags.DEFINE_config_file(
        "config", None, "FILE[:ARG], rlx:NAME", flag_values=values, lock_config=True, sys_argv=argv
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
    except UserError:
        raise
    except Exception as error:
        inner: BaseException = error
        while inner.__context__ is not None:  # the flag libraries wrap a ValueError twice
            inner = inner.__context__
        if place := _place(inner, argv):
            what = " ".join(f"{type(inner).__name__}: {inner}".split())
            raise UserError(f"{place}: {what}; mend the config, --traceback shows more") from error
        if not isinstance(error, flags.Error | OSError | TypeError | ValueError):
            raise
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise UserError(lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}") from error


def _place(error: BaseException, argv: list[str]) -> str:
    """Return `FILE:LINE` of the config that an exception came through; empty where it did not."""
    file = config_file(argv)
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f.lineno for f in frames if Path(f.filename).absolute() == file.absolute()]
    return f"{file}:{lines[-1]}" if lines else ""


def config_file(argv: list[str]) -> Path:
    """Return the config's file on a command line; the working directory where there is none."""
    given = (a.split("=", 1)[1].split(":", 1)[0] for a in _joined(argv) if a[:9] == "--config=")
    return Path(next(given, ""))


@contextmanager
def _neighbours(argv: list[str]) -> Iterator[None]:
    """Let DIR/configs/x.py import `configs.y`, its neighbour or one of rlx, wherever it is run."""
    root, embedded = str(config_file(argv).absolute().parent.parent), str(_embedded())
    last = [embedded] if embedded not in sys.path else []
    sys.path[:] = [root, *sys.path, *last]
    try:
        yield
    finally:
        for path in (root, *last):
            sys.path.remove(path)


def _check_file(config_file: str) -> None:
    if not config_file:
        raise UserError("no --config=FILE given; try --config=rlx:arithmetic")
    path = Path(config_file.split(":", 1)[0])
    if not path.is_file():
        here = [str(p) for p in sorted(path.parent.glob("*.py"))]
        near = difflib.get_close_matches(str(path), here, n=1)
        hint = f"did you mean {near[0]}?" if near else "give the path of a .py with get_config()"
        raise UserError(f"no config file {path}; {hint}")


def leaves(tree: Mapping[str, Any] | ConfigDict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of all that a config, or its JSON, has."""
    for key in tree:
        value = tree[key]
        if isinstance(value, ConfigDict | Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
