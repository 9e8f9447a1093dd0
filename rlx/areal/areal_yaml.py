"""Read a YAML file of AReaL's, of any generation, as a config of rlx's in Python.

`python -m rlx.areal FILE` prints it; a command line takes it as `--config=FILE.yaml`. By
PyYAML, which transformers needs: OmegaConf pins another antlr4 than math-verify does.
"""

import datetime
import fnmatch
import math
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from rlx import config as configs
from rlx.algorithms.algorithm import FIELDS
from rlx.algorithms.presets import PRESETS, idle
from rlx.areal.areal_keys import DEFAULTS, LOST, NOTHING, ROWS, TABLE, ArealFile, ArealLoader
from rlx.base import UserError, nearest
from rlx.cli import command
from rlx.cli.text import plain

_ROW_KEYS = {row.key for row in ROWS}
_TRAINING = ("algorithm.", "optimizer.", "train.", "checkpoint.")
_IDLE: tuple[Any, ...] = (None, False, "", [], {}, "disabled")  # values that ask for nothing
_SECRET = re.compile(r"(?i)((?:key|token|password|secret)'? ?[:=] ?)('[^']*'|[^',}]+)")
_SIZES = ("task_type", "port_count", "gpu", "cpu", "mem", "cmd")  # of a scheduling_spec


def _parsed(text: str, what: str) -> Any:
    try:
        return yaml.load(text, ArealLoader)
    except (yaml.YAMLError, ValueError, AttributeError, RecursionError) as error:  # all PyYAML's
        raise UserError(f"{what} is no YAML ({' '.join(str(error).split())})") from None


def load(
    path: Path, overrides: Iterable[str], now: datetime.datetime, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Return dotted key → value of a file after overrides `key=value`, interpolated.

    UserError if it cannot be read, or an override or an interpolation means nothing.
    """
    try:
        tree = _parsed(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path} ({error}); give a YAML file of AReaL's") from None
    if not isinstance(tree, dict) or "defaults" in tree:
        raise UserError(f"{path} is no whole config: want blocks of keys, and no `defaults`")
    for override in overrides:
        key, equals, text = override.lstrip("+").partition("=")
        if not equals or not re.fullmatch(r"[\w.]+", key):
            raise UserError(f"{override!r} overrides nothing; write as actor.eps_clip=0.3")
        *blocks, name = key.split(".")
        block = tree
        for part in blocks:
            block[part] = dict(block[part]) if isinstance(block.get(part), dict) else {}
            block = block[part]  # a copy: two blocks may be one, by an alias
        value, was = _parsed(text, override), block.get(name)
        block[name] = was | value if isinstance(value, dict) and isinstance(was, dict) else value

    def resolved(node: Any, at: tuple[str, ...], seen: tuple[Any, ...]) -> Any:
        if isinstance(node, dict | list):
            keys = node if isinstance(node, dict) else range(len(node))
            children = {key: resolved(node[key], (*at, str(key)), seen) for key in keys}
            return children if isinstance(node, dict) else [*children.values()]
        while isinstance(node, str) and (match := re.search(r"\$\{([^${}]*)\}", node)):
            value = meaning(match[1].strip(), at, seen)
            before, after = node[: match.start()], node[match.end() :]
            node = f"{before}{value}{after}" if before + after else value
        return node

    def meaning(text: str, at: tuple[str, ...], seen: tuple[Any, ...]) -> Any:
        kind, _, rest = text.partition(":")
        if kind == "now" and rest:
            return now.strftime(rest)
        name, comma, otherwise = rest.partition(",")
        if kind == "oc.env" and (name in environment or comma):
            return environment.get(name, otherwise.strip())
        absolute = text.lstrip(".")
        up = len(text) - len(absolute)
        place: tuple[str, ...] = (*(at[:-up] if up else ()), *absolute.split("."))
        node: Any = tree
        for part in place:
            node = node.get(part, NOTHING) if isinstance(node, dict) else NOTHING
        node = DEFAULTS.get(absolute, NOTHING) if node is NOTHING else node
        if node is NOTHING or place in seen:
            why = "names nothing" if node is NOTHING else "goes round in a circle"
            raise UserError(f"{path}: {'.'.join(at)} has ${{{text}}}, which {why}")
        return resolved(node, place, (*seen, place))

    try:
        return dict(_leaves(resolved(tree, (), ())))
    except RecursionError:
        raise UserError(f"{path} has an alias for what it stands in; write that out") from None


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def modern(leaves: Mapping[str, Any]) -> ArealFile:
    """Return the values of a file by the names of the newest release."""
    blocks = {key.split(".")[0] for key in leaves}
    first = bool(blocks & {"dataset", "ppo", "exp_ctrl"})
    table = dict(TABLE["first" if first else "older"])
    if "actor" in blocks:
        table.pop("model.", None)
    values, names = {}, {}
    for name, value in leaves.items():
        old = next((o for o in table if name == o or (o[-1] in "._" and name.startswith(o))), "")
        key = table[old] + name.removeprefix(old) if old else name
        if key.endswith("scheduling_spec") and isinstance(value, list):  # but for what it costs
            if not all(isinstance(spec, dict) for spec in value):
                raise UserError(f"{_comment_line(name, value)}: want a list of blocks")
            specs = [{k: v for k, v in spec.items() if k not in _SIZES and v} for spec in value]
            value = [spec for spec in specs if spec]
        if not _alike(value, DEFAULTS.get(key)):
            raise UserError(
                f"{_comment_line(name, value)}: want one like AReaL's own, {DEFAULTS[key]!r}"
            )
        values[key], names[key] = value, name
    if first:
        group, norm = values.pop("actor.group_adv_norm", 0), values.pop("actor.adv_norm", True)
        levels = {"mean_level": "group", "std_level": "group"} if group else {}
        values["actor.adv_norm"] = {} if norm else None
        values |= {f"actor.adv_norm.{key}": value for key, value in levels.items() if norm}
        if values.pop("actor.disable_value", False):
            values = {key: value for key, value in values.items() if not key.startswith("critic.")}
        else:
            values.setdefault("critic.path", values.get("actor.path"))
        values.setdefault("ref.path", values.get("actor.path"))
    for old in ("actor.behav_imp_weight_", "actor.behave_imp_weight_"):
        cap, mode = values.pop(f"{old}cap", NOTHING), values.pop(f"{old}mode", "token_mask")
        if cap is not NOTHING and mode != "disabled":
            level, _, action = str(mode).replace("truncate", "clamp").partition("_")
            now = {"level": level, "action": action, "upper": float("inf") if cap is None else cap}
            values |= {f"actor.rejection_sampling.{key}": value for key, value in now.items()}
    return ArealFile(values, names, TABLE["first_defaults"] if first else None)


def _alike(value: Any, usual: Any) -> bool:
    """Return whether a value has the type of AReaL's default; True where either is missing."""
    if value in (None, {}) or usual is None:
        return True
    if isinstance(usual, list):
        return isinstance(value, list | str)
    number = isinstance(value, int | float) and type(usual) in (int, float)
    if isinstance(value, bool):
        return usual == "disabled" or isinstance(usual, bool)  # YAML's on and off
    return number or isinstance(value, type(usual))


def _unset(key: str, value: Any, file: ArealFile) -> str | None:
    """Return what is lost with a key that sets nothing, "" for nothing; None: it is not AReaL's."""
    if value in (None, {}) and any(name.startswith(f"{key}.") for name in DEFAULTS):
        return ""  # a block
    for words, *patterns in TABLE["unset"]:
        for pattern in patterns:
            name, _, usual = pattern.partition("=")
            if fnmatch.fnmatchcase(key, name):
                role, _, rest = key.partition(".")
                actors = file.given.get(f"actor.{rest}") if role in ("ref", "critic") else None
                asks = value not in (*_IDLE, _parsed(usual, ""), actors)
                other_engine = role in ("vllm", "sglang") and role not in file.facts
                return words if asks and not other_engine else ""
    return None


def _comment_line(key: str, value: Any) -> str:
    """Return `key = value` for a comment: one line, no secret."""
    text, most = _SECRET.sub(r"\1…", f"{key} = {value!r}"), len(key) + 63
    return _line(text if len(text) <= most else text[: most - 1] + "…")


def _line(text: str) -> str:
    return re.sub(r'[\n"\\]', " ", plain(text))  # nothing ends a comment or a docstring


def _typed(key: str, value: Any, to: str, usual: Any) -> Any:
    """Return a value of AReaL's `key` in the type that `to` has."""
    field = FIELDS.get(to.removeprefix("algorithm.")) if to.startswith("algorithm.") else None
    kind = type(field.default) if field else type(usual)
    if isinstance(value, float) and not (value > -math.inf and (kind is float or value < math.inf)):
        raise UserError(f"{_comment_line(key, value)}: {to} takes a number")
    if type(value) in (int, float) and kind in (int, float) and kind(value) == value:
        return kind(value)
    if not isinstance(value, kind):
        raise UserError(f"{_comment_line(key, value)}: {to} takes {kind.__name__}")
    return value


def python(file: ArealFile, name: str) -> tuple[str, list[str]]:
    """Return a config as the text of a Python file, and lines on what it leaves out.

    UserError for a key that is none of AReaL's but near one, or a value of a wrong type.
    """
    usual = dict(configs.leaves(configs.default()))
    values: dict[str, Any] = {}
    comments: dict[str, str] = {}
    gaps, same = [], []
    for row in ROWS:
        of_rl = row.to.startswith("algorithm.") and row.to != "algorithm.preset"
        if of_rl and ("rl" in file.facts) == (row.to == "algorithm.pair_beta"):
            continue  # the other trainers take nothing else
        if "data" not in file.facts and row.to.startswith(_TRAINING):
            continue  # an evaluation
        key, file_value = file.names.get(row.key, row.key), file[row.key]
        try:
            value = row(file)
        except (TypeError, ValueError, AttributeError, OverflowError):
            usual_type = type(usual[row.to]).__name__
            raise UserError(
                f"{_comment_line(key, file_value)}: {row.to} takes {usual_type}"
            ) from None
        if value is LOST:
            gaps.append(f"{_comment_line(key, file_value)}: {row.says or 'not here'}")
        elif value is not NOTHING:
            values[row.to] = _typed(key, value, row.to, usual[row.to])
            comment = key if row.key in file.given else f"{key}, its default"
            comments[row.to] = (
                comment if file_value == value else _comment_line(comment, file_value)
            )
    for key in [key for key in file.given if key not in _ROW_KEYS]:
        file_key = file.names.get(key, key)
        words = _unset(key, file.given[key], file)
        if words is None and (near := nearest(key, DEFAULTS, most=2)):
            raise UserError(f"unknown key {file_key!r} in {name}; did you mean {near!r}?")
        if words == "":
            same.append(_line(file_key))
            continue
        gaps.append(
            f"{_comment_line(file_key, file.given[key])}: {words or 'no key of AReaL, not read'}"
        )
    gaps += [f"{key}: {text}" for key, text in file.notes.items()]
    algorithm = {to.removeprefix("algorithm."): value for to, value in values.items()
                 if to.startswith("algorithm.") and to != "algorithm.preset"}  # fmt: skip
    preset = PRESETS[values.get("algorithm.preset", "grpo")]
    idles = idle(replace(preset, **algorithm))
    usual |= {f"algorithm.{name}": getattr(preset, name) for name in FIELDS}
    body = [f"    c.{to} = {value!r}  # AReaL: {comments[to]}".replace("= inf ", '= float("inf") ')
            for to, value in sorted(values.items())
            if to.removeprefix("algorithm.") not in idles
            and (value != usual[to] or ", its default" not in comments[to])]  # fmt: skip
    text = [f'"""{name}, of AReaL, as rlx has it."""\n', "from rlx.config import default\n\n",
            "def get_config():", '    """The run of that file."""', "    c = default()", *body,
            "    return c\n\n", "# Not from the file, or otherwise:", *(f"#   {x}" for x in gaps),
            "# By these nothing changes:", f"#   {', '.join(same)}"]  # fmt: skip
    return "\n".join(text), gaps


def convert(path: str, overrides: Iterable[str]) -> tuple[str, list[str]]:
    """Return what `python` does of a file, with overrides, here and now."""
    leaves = load(Path(path), overrides, datetime.datetime.now(), os.environ)
    keys = leaves.keys() & dict(configs.leaves(configs.default())).keys() - _ROW_KEYS
    if 2 * len(keys) > len(leaves):
        raise UserError(
            f"{path} has keys of rlx ({', '.join(sorted(keys)[:3])}), and YAML is read as AReaL's; "
            "set them in a .py file with get_config(), or as --config.KEY=VALUE"
        )
    return python(modern(leaves), _line(Path(path).name))


def config_of(path: str, overrides: str = "") -> Any:
    """Return the config of a file, after overrides that are quoted as in a shell.

    Prints the keys that rlx has not to stderr.
    """
    try:
        args = shlex.split(overrides)
    except ValueError as error:
        hint = "quote as a shell would"
        raise UserError(f"{overrides!r} overrides nothing ({error}); {hint}") from None
    text, gaps = convert(path, args)
    for line in gaps:
        command.say(f"{path}: {line}", sys.stderr)
    names: dict[str, Any] = {}
    exec(text, names)
    return names["get_config"]()
