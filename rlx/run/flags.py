"""Parse command lines with a config: `--config=FILE[:ARG] --config.key=value`.

In the place of FILE, rlx:NAME is configs/NAME.py of the files that come with rlx. FILE may also be
a YAML file of AReaL, and `allocation_mode` one of its allocations.
"""

import argparse
import ast
import re
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from rlx.base import UserError, nearest
from rlx.cli.command import Parser, say
from rlx.cli.key_names import configs_home, nearest_key, unknown_key
from rlx.config import OPTIONS, check_tuple, leaves, with_environment
from rlx.launch import allocation
from rlx.train.train_options import AUTO

_YAML = (".yaml", ".yml")
# Numbers that a flag may also set to `auto`.
_ZERO_IS_AUTO = ("rollout.max_concurrent_rollouts", "train.max_tokens_per_microbatch")


def parse(
    argv: list[str],  # as sys.argv
    *,
    config_needed: bool = True,  # whether it is a mistake to give no config
    switches: Mapping[str, str] = MappingProxyType({}),  # name → help of flags without a value
    **strings: str,  # name → help of further flags; each defaults to ""
) -> tuple[Any, argparse.Namespace]:
    """Read `argv` (program name first) into a config and the values of extra string flags.

    The config, with overrides, is None where none was given and none is needed. Or UserError.
    """
    # Other commands write --dry-run; both are right.
    argv = [re.sub("^--(?!config)[^=]+", lambda m: f"--{m[0][2:].replace('-', '_')}", argument)
            for argument in _joined_flags(argv)]  # fmt: skip
    overrides = [a for a in argv if a.startswith("--config.")]
    plain = [a for a in argv[1:] if a not in overrides]
    values, rest = _parser(argv[0], switches, strings).parse_known_args(plain)
    if has_config := config_needed or values.config or overrides:
        _check_file(values.config, plain)
    _check_flags(plain, ("config", *strings, *switches))
    workdir = Path(getattr(values, "workdir", ""))
    if workdir.exists() and not workdir.is_dir():
        raise UserError(f"--workdir={workdir} is a file; give a directory")
    config = with_overrides(_load(values.config), overrides) if has_config else None
    if rest:
        key = nearest_key(rest[0].partition("=")[0].lstrip("+"), OPTIONS) if "=" in rest[0] else ""
        hint = f"did you mean --config.{key}=…?" if key else "flags start with --, see --help"
        raise UserError(f"unexpected argument {rest[0]!r}; {hint}")
    return config, values


def _parser(program: str, switches: Mapping[str, str], strings: Mapping[str, str]) -> Parser:
    """Return the parser of a command's own flags; its --help leads to the config's keys."""
    path = Path(program)
    name = path.parent.name if path.name == "__main__.py" else path.name.removesuffix(".py")
    name = f"rlx.{name.removeprefix('rlx.')}"
    keys = "`rlx keys` lists every KEY, `rlx configs` each rlx:NAME"
    usage = f"python -m {name} --config=FILE[:ARG] [--config.KEY=VALUE …] [--traceback]"
    parser = Parser(name, usage=usage, epilog=keys, allow_abbrev=False)
    file = "FILE[:ARG], or rlx:NAME[:ARG]"
    parser.add_argument("--config", nargs="?", default="", const="", help=file)
    for flag, text in strings.items():
        parser.add_argument(f"--{flag}", default="", help=text.replace("%", "%%"))
    for flag, text in switches.items():
        parser.add_argument(  # --NAME, or --NAME=true as absl's flags
            f"--{flag}", nargs="?", const=True, default=False, type=_boolean, help=text
        )
    return parser


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is not true or false")
    return text.lower() == "true"


def _load(text: str) -> ConfigDict:
    """Return what get_config of FILE[:ARG] returns; UserError with the line of a mistake in it."""
    name, *arguments = text.split(":", 1)
    file = Path(name)
    if file.suffix in _YAML:
        from rlx.areal import areal_yaml

        return areal_yaml.config_of(name, *arguments)
    try:
        with _neighbours(file):
            make = runpy.run_path(name).get("get_config")
            config = make(*arguments) if callable(make) else None
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{_place(error, file)}: {_mistake(error)}") from error
    if not callable(make):
        what = "define get_config(), which returns a ConfigDict"
        raise UserError(f"{file} has no function get_config; {what}")
    if not isinstance(config, ConfigDict):
        what = f"returns {type(config).__name__.removesuffix('Type')}"
        raise UserError(f"get_config() of {file} {what}; let it return a ConfigDict")
    return config


def with_overrides(config: ConfigDict, overrides: Sequence[str]) -> ConfigDict:
    """Return `config` after flags `--config.KEY=VALUE`, and what its values stand for."""
    known, argv = dict(leaves(config)), ["rlx"]
    for override in overrides:
        key, equals, text = override.removeprefix("--config.").partition("=")
        if not equals:
            raise UserError(f"{override} has no value; write {override}=VALUE")
        if key not in known:
            raise unknown_key(key, known)
        text = "0" if text == AUTO and key in _ZERO_IS_AUTO else text
        _check_value(key, text, known[key])
        text = _as_tuple(text) if isinstance(known[key], tuple) else text
        argv.append(f"--config.{key}={text}")
    values = flags.FlagValues()
    try:
        config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=argv)
        values(argv)
    except (flags.Error, TypeError, ValueError) as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise UserError(" ".join(dict.fromkeys((lines[0], lines[-1])))) from error
    for key, value in leaves(config):
        check_tuple(key, value)
    with_environment(config)
    if config.get("allocation_mode") not in (None, "", AUTO):
        try:
            allocation.parse(config.allocation_mode)
        except UserError:
            from rlx.areal import areal_allocation

            config.allocation_mode, changes = areal_allocation.translate(config.allocation_mode)
            for change in changes:
                say(f"allocation_mode: {change}", sys.stderr)
    return config


def _check_value(key: str, text: str, default: Any) -> None:
    """Raise UserError where the text of a flag is no number, or no truth value, as the default."""
    kind, words = type(default), {int: "a whole number", float: "a number", bool: "True or False"}
    with suppress(ValueError):
        if kind in words:
            (flags.BooleanParser().parse if kind is bool else kind)(text)
        return
    raise UserError(f"--config.{key}={text} is not {words[kind]}; give one like {default}")


def number(values: Any, name: str, kind: Callable[[str], Any], default: Any) -> Any:
    """Return a string flag as `kind` reads it, `default` if empty; UserError for no number."""
    text = getattr(values, name)
    try:
        return kind(text) if text else default
    except ValueError:
        raise UserError(f"--{name}={text} is not a number; give one like {default}") from None


def _joined_flags(argv: list[str]) -> list[str]:
    """Return `argv` with `--config FILE` as `--config=FILE`, and the path for rlx:NAME."""
    joined: list[str] = []
    for argument in argv:
        if joined and joined[-1] == "--config" and not argument.startswith("-"):
            argument = f"{joined.pop()}={argument}"
        if argument.startswith("--config=rlx:"):
            name, *more = argument.removeprefix("--config=rlx:").split(":", 1)
            if name not in (names := shipped_configs()):
                near = nearest(name, names)
                hint = f"did you mean rlx:{near}?" if near else "`rlx configs` lists them"
                raise UserError(f"no config rlx:{name}; {hint}")
            argument = ":".join([f"--config={names[name]}", *more])
        joined.append(argument)
    return joined


def shipped_configs() -> dict[str, Path]:
    """Return name → file of each config that comes with rlx."""
    place = configs_home() / "configs"
    paths = [path.relative_to(place) for path in sorted(place.glob("**/*.py"))]
    configs = [path for path in paths if path.parts[0] not in ("agents", "data")]
    return {str(path.with_suffix("")): place / path for path in configs}


def _as_tuple(text: str) -> str:
    """Return `q,k` as `('q', 'k')`; unchanged where it is spelled as in Python."""
    if re.fullmatch(r"[\w.:/-]+(?:,[\w.:/-]+)+", text):
        try:
            ast.literal_eval(text)  # numbers
        except (SyntaxError, ValueError):
            return repr(tuple(text.split(",")))
    return text


def _mistake(error: BaseException) -> str:
    """Return what is wrong in a config file, with the key that was meant."""
    text, frame = " ".join(str(error).split()), traceback.extract_tb(error.__traceback__)[-1]
    if cast := re.search(r"'(\w+)'.*?\. (.*) is of .*?'([\w.]+)'.* to .*?'([\w.]+)'", text):
        key, value, *kinds = cast.groups()
        got, wanted = (kind.rpartition(".")[2] for kind in kinds)
        return f"{key}={value} is of type {got}; give {wanted}"
    key = re.search(r"""["'\\]+(\w+)["'\\]+""", text)
    if key and frame.filename.endswith("config_dict.py"):
        source = "\n".join(f.line or "" for f in traceback.extract_tb(error.__traceback__))
        source = re.sub(r"""\[["'](\w+)["']\]""", r".\1", source)
        match = re.search(rf"\w\.((?:\w+\.)*{key[1]}(?:\.\w+)*)", source)
        return str(unknown_key(match[1] if match else key[1], OPTIONS))
    return f"{type(error).__name__}: {text}; mend the config, --traceback shows more"


def _place(error: BaseException, file: Path) -> str:
    """Return `FILE:LINE` of the config that an exception came through; FILE where it did not."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f.lineno for f in frames if Path(f.filename).absolute() == file.absolute()]
    return f"{file}:{lines[-1]}" if lines else f"{file}"


def config_file(argv: list[str]) -> Path:
    """Return the config's file on a command line; the working directory where there is none."""
    files = (a.removeprefix("--config=") for a in _joined_flags(argv) if a.startswith("--config="))
    return Path(next(files, "").partition(":")[0])


@contextmanager
def _neighbours(file: Path) -> Iterator[None]:
    """Let DIR/configs/x.py import `configs.y`, its neighbour or one of rlx, wherever it is run."""
    root, rlx_root = str(file.absolute().parent.parent), str(configs_home())
    last = [rlx_root] if rlx_root not in sys.path else []
    sys.path[:] = [root, *sys.path, *last]
    try:
        yield
    finally:
        for path in (root, *last):
            sys.path.remove(path)


def _check_flags(arguments: Sequence[str], names: Sequence[str]) -> None:
    """Raise UserError for a flag that is none of `names`, where it is clear which was meant."""
    for argument in arguments:
        name = argument.lstrip("-").partition("=")[0]
        if argument[:2] != "--" or name in (*names, "help"):
            continue
        near = nearest(name, names)
        key = f"--{near}" if near else nearest_key(name.removeprefix("config_"), OPTIONS)
        if key and key.strip("-") in names:
            raise UserError(f"unknown flag --{name}; did you mean {key}?")
        if key and "config" in names and key[:2] != "--":
            raise UserError(f"unknown flag --{name}; did you mean --config.{key}=…?")


def _check_file(config_file: str, arguments: Sequence[str]) -> None:
    if not config_file:
        bare = [f"rlx:{a}" if a in shipped_configs() else a for a in arguments if a[:1] != "-"]
        files = [a for a in bare if a.endswith((".py", *_YAML)) or a[:4] == "rlx:"]
        raise UserError(f"no --config=FILE given; try --config={[*files, 'rlx:arithmetic'][0]}")
    path = Path(config_file.split(":", 1)[0])
    if path.is_dir():
        raise UserError(f"--config={path} is a directory; give one of its .py files")
    if not path.is_file() and path.suffix not in _YAML:
        near = nearest(path.name, (other.name for other in path.parent.glob("*.py")))
        name = "" if near else nearest(path.stem, shipped_configs())
        near = str(path.with_name(near)) if near else name and f"rlx:{name}"
        hint = f"did you mean {near}?" if near else "give the path of a .py with get_config()"
        raise UserError(f"no config file {path}; {hint}")
