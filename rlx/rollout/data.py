"""Read dataset rows from a file or the hub, and deal them out.

A row is a dict of JSON values with a question (text, or chat messages) and mostly an answer;
whatever else it holds reaches the reward function too. Every mistake in a file is an error that
names file and line, or row.
"""

import csv
import difflib
import hashlib
import inspect
import io
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlx.base import UserError, install
from rlx.cli import user_code
from rlx.rollout import arithmetic, word_problems

Row = dict[str, Any]

MOST_ROWS = 1_000_000  # of a user's own code, which may have no end
_NONE: Mapping[str, str] = {}
_ROLES = ("system", "developer", "user", "assistant", "tool")
_CODE = re.compile(r".+\.py:\w+|[\w.]+:\w+")
GENERATED = {"arithmetic": arithmetic.problems, "word_problems": word_problems.problems}

_HUB_NAME = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?P<options>(:[\w.+\[\]%-]+){0,2})")


def load(
    source: str,
    question_key: str = "question",
    answer_key: str = "answer",
    *,
    texts: Mapping[str, str] = _NONE,
    needed: Iterable[str] = (),
    split: str = "train",
) -> list[Row]:
    """Return the rows of a file, a hub data set or a user's code, with `answer` of `answer_key`.

    Args:
      source: a path; `owner/name`, `owner/name:split`, `owner/name:config:split`; FILE.py:name or
        module:name. A file is read by its suffix: .csv, .parquet, others as .jsonl or JSON array.
      question_key: key of each row's text or chat messages; not looked at if empty.
      answer_key: key of the answer that rewards compare with; every row has it, unless empty.
      texts: keys of further texts, or chat messages, that every row has → the option of each.
      needed: keys of whatever else every row has.
      split: of a hub data set whose name gives none, and of a function that takes one.

    Raises:
      UserError: a missing file, a bad row, an unreachable or unknown data set.
    """
    options = {question_key: "data.question_key", answer_key: "data.answer_key", **texts}
    wanted = dict.fromkeys([*filter(None, options), *needed])
    rows = []
    for where, row in _rows(source, split):
        _check_keys(row, where, wanted, options)
        for key in filter(None, (question_key, *texts)):
            row[key] = _said(row[key], f"{where}: {key!r}")
        if question_key:
            _check_question(row[question_key], f"{where}: {question_key!r}")
        rows.append({**row, "answer": row[answer_key]} if answer_key else row)
    if not rows:
        raise UserError(f"{source} has no rows; give another file, or another split")
    return rows


class Source(NamedTuple):
    """Rows of one place, and how often they are dealt out beside those of others."""

    name: str
    rows: list[Row]
    weight: float = 1.0


def named_sources(options: Any) -> list[tuple[str, float]]:
    """Return name and weight of each source of training rows; none where they are generated.

    Args:
      options: as config.data: `dataset` or `mix`, else `kind` and `train` say it.

    Raises:
      UserError: they contradict each other, or none is given.
    """
    if options.dataset and options.mix:
        raise UserError("data.dataset and data.mix are both set; name the one in the other")
    if options.dataset or options.mix:
        return [tuple(entry) for entry in options.mix] or [(options.dataset, 1.0)]
    if options.kind in GENERATED and options.train:
        raise UserError(
            f"data.train={options.train} is not read, as data.kind={options.kind} makes the rows; "
            "set data.kind=jsonl"
        )
    if options.kind not in GENERATED and not options.train:
        raise UserError("data.train is empty; give a .jsonl file or a hub name")
    return [(options.train, 1.0)] if options.train else []


def is_code(source: str) -> bool:
    """Return whether a source is a user's own code: FILE.py:name or module:name."""
    return bool(_CODE.fullmatch(source))


def _rows(source: str, split: str) -> Iterator[tuple[str, Row]]:
    """Yield place and row of a source, in order."""
    path = Path(source)
    if is_code(source):
        return _own_rows(source, split)
    hub = _HUB_NAME.fullmatch(source) and not path.parent.is_dir()
    if hub and not path.exists() and path.suffix.lower() not in _READERS:
        return _hub_rows(source, split)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"no file {path}{_nearest(path)}") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; give a .jsonl file") from None
    return _READERS.get(path.suffix.lower(), _json_lines)(content, path)


def takes_split(source: str) -> bool:
    """Return whether a source is a function that takes `split`, and so has held-out rows too."""
    made = user_code.find("dataset", source)
    return callable(made) and "split" in inspect.signature(made).parameters


def _own_rows(source: str, split: str) -> Iterator[tuple[str, Row]]:
    """Yield place and row of a user's iterable, or of the one that a user's function returns."""
    made, n = user_code.find("dataset", source), 0
    try:
        if callable(made):
            made = made(split=split) if takes_split(source) else made()
        for n, row in enumerate(made, 1):
            if n > MOST_ROWS:
                raise UserError(
                    f"{source} gives more than {MOST_ROWS:,} rows and may never end, and a run "
                    "reads all as it starts; end it, as by itertools.islice"
                )
            yield f"{source}, row {n}", _plain(row, f"{source}, row {n}", default=None)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{source} gives no row {n + 1}: {user_code.where(error)}") from error


def _json_lines(content: bytes, path: Path) -> Iterator[tuple[str, Row]]:
    """Yield place and row of a file with one JSON object a line, or of an array of them."""
    content = content.removeprefix(b"\xef\xbb\xbf")
    if not content.strip():
        raise UserError(f"{path} is empty; it needs one JSON object a line")
    if content.lstrip().startswith(b"["):
        for n, row in enumerate(_parsed(content, str(path)), 1):
            yield f"{path}, row {n}", _row(row, f"{path}, row {n}")
        return
    for n, line in enumerate(content.split(b"\n"), 1):
        if line.strip():
            yield f"{path}:{n}", _row(_parsed(line, f"{path}:{n}"), f"{path}:{n}")


def _csv(content: bytes, path: Path) -> Iterator[tuple[str, Row]]:
    """Yield `FILE:LINE` and row of a table with a header; every value is text."""
    text = io.TextIOWrapper(io.BytesIO(content), "utf-8-sig", newline="")
    csv.field_size_limit(sys.maxsize)  # of all readers; it was 128 KiB
    table = csv.DictReader(text, strict=True)
    try:
        for row in table:
            if None in row or None in row.values():
                raise UserError(
                    f"{path}:{table.line_num}: the row has more or fewer fields than the header; "
                    "mend it, and quote texts that hold commas"
                )
            yield f"{path}:{table.line_num}", row
    except (csv.Error, UnicodeDecodeError) as error:
        line = table.reader.line_num
        raise UserError(f"{path}:{line}: not CSV: {error}; mend it, saved as UTF-8") from None


def _parquet(content: bytes, path: Path) -> Iterator[tuple[str, Row]]:
    """Yield place and row of a Parquet file, by the `pyarrow` package."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise UserError(
            f"reading {path} needs pyarrow; {install('parquet')}, or give a .jsonl file"
        ) from None
    n = 0
    try:
        for batch in parquet.ParquetFile(io.BytesIO(content)).iter_batches():
            for row in batch.to_pylist():
                n += 1
                yield f"{path}, row {n}", _plain(row, f"{path}, row {n}")
    except (ArrowException, OSError) as error:
        raise UserError(f"{path}, after row {n}: not Parquet: {error!r:.200}") from None


_READERS = {".jsonl": _json_lines, ".json": _json_lines, ".csv": _csv, ".parquet": _parquet}
FORMATS = tuple(_READERS)


def _hub_rows(source: str, split: str) -> Iterator[tuple[str, Row]]:
    """Yield place and row of a Hugging Face data set, by the `datasets` package."""
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"{source} is not a file, and reading it from the hub needs the datasets package; "
            f"{install('hub')}, or give the path of a .jsonl file"
        ) from None
    name, *options = source.split(":")
    split = options[-1] if options else split
    config = options[0] if len(options) == 2 else None
    try:
        config = config or _default_config(datasets.get_dataset_config_names(name))
        found = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # the package raises dozens of kinds; each line says why
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise UserError(
            f"cannot load {source} ({name}, config {config or 'default'}, split {split}) from the "
            f"hub: {reason}; check name and network, or give the path of a .jsonl file"
        ) from error
    for n, row in enumerate(found, 1):
        yield f"{source}, row {n}", _plain(row, f"{source}, row {n}")


class Cursor:
    """An endless sequence of rows; the order of an epoch is a function of (seed, epoch).

    Position p, from 0, is row p mod N of epoch ⌊p/N⌋. A prompt's group_id is its position, so
    a restored run finds the row of any prompt again.

    Several sources share the positions by their weights, and each goes through epochs of its own.
    The first takes ⌈p·w₁⌉ of the p positions from 0, the next as many of those that it leaves, and
    so on, from the largest weight to the smallest: after any number of prompts, each of K sources
    has had its share of them within 1 + ln K.

    Args:
      mix: number of rows and weight of each source, in the order of `rows`; empty: one source.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        seed: int = 0,
        shuffle: bool = True,
        mix: Sequence[tuple[int, float]] = (),
    ):
        if not rows:
            raise UserError("the dataset has no rows; it needs at least one")
        self._mix = [list(part) for part in mix] if len(mix) > 1 else []
        self._parts = _parts(mix or [(len(rows), 1.0)])
        self._rows, self._seed, self._shuffle = rows, seed, shuffle
        self._orders: dict[tuple[int, int], np.ndarray] = {}
        self._digest: str | None = None
        self.position = 0

    def next(self) -> tuple[int, Mapping[str, Any]]:
        """Return (position, row) and move on."""
        position = self.position
        self.position += 1
        return position, self.row(position)

    def row(self, position: int) -> Mapping[str, Any]:
        """Return the row at `position` ≥ 0."""
        return self._rows[self.index(position)]

    def index(self, position: int) -> int:
        """Return the index, from 0, of the dataset's row at `position` ≥ 0."""
        place = position
        for part in self._parts:
            taken = math.ceil(place * part.share)
            if math.ceil((place + 1) * part.share) > taken:
                epoch, place = divmod(taken, part.size)
                return part.first + int(self._order(part, epoch)[place])
            place -= taken
        raise AssertionError("the last part takes all that is left")

    def state_dict(self) -> dict[str, Any]:
        """Return JSON-able state for `load_state_dict`."""
        return {
            "position": self.position,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "rows": len(self._rows),
            "digest": self._content(),
            "mix": self._mix,
        }

    def load_state_dict(self, state: Mapping[str, Any], allow_change: bool = False) -> str:
        """Continue where `state` was.

        Args:
          allow_change: accept other rows; a prompt already begun uses the row now in its place.

        Returns:
          A sentence on what changed in the rows; empty if nothing did.

        Raises:
          UserError: rows, seed or shuffling are not those of the state.
        """
        mine, changed = self.state_dict(), ""
        for key, what in (
            ("seed", "seed"),
            ("shuffle", "data.shuffle"),
            ("rows", "number of rows"),
            ("digest", "dataset's content"),
            ("mix", "rows and weights of data.mix"),
        ):
            if mine[key] == state.get(key, []):  # older states have no mix
                continue
            numbers = f"{state.get(key)} before, {mine[key]} now"
            found = f"the {what} changed since the checkpoint ({numbers})"
            of_rows = key in ("rows", "digest", "mix")
            if not (of_rows and allow_change):
                remedy = ", set data.allow_change=True" if of_rows else ""
                raise UserError(f"{found}; change it back{remedy}, or start in a fresh --workdir")
            changed = changed or found
        self.position = int(state["position"])
        return changed

    def _order(self, part: "_Part", epoch: int) -> np.ndarray:
        key = part.number, epoch
        if key not in self._orders:
            own = [other for other in self._orders if other[0] == part.number]
            if len(own) > 2:  # an epoch's stragglers need the one before, no more
                self._orders.pop(min(own))
            seeds = [self._seed, epoch, *([part.number] if part.number else [])]
            rng, n = np.random.default_rng(seeds), part.size
            self._orders[key] = rng.permutation(n) if self._shuffle else np.arange(n)
        return self._orders[key]

    def _content(self) -> str:
        """Return a digest of all rows, computed once: rows do not change during a run."""
        if self._digest is None:
            digest = hashlib.blake2b(digest_size=8)
            for row in self._rows:
                digest.update(json.dumps(row, sort_keys=True).encode())
            self._digest = digest.hexdigest()
        return self._digest


class _Part(NamedTuple):
    """A source of a cursor: its `size` rows from `first` on."""

    number: int
    first: int
    size: int
    share: Fraction  # of the positions that the parts before leave; 1 for the last


def _parts(mix: Sequence[tuple[int, float]]) -> list[_Part]:
    """Return the parts of a mix, of falling weight; weights are as their decimals say."""
    weights = [Fraction(str(weight)) for _, weight in mix]
    firsts = np.cumsum([0, *(count for count, _ in mix)]).tolist()
    parts, left = [], sum(weights)
    for i in sorted(range(len(mix)), key=lambda i: -weights[i]):
        parts.append(_Part(i, firsts[i], mix[i][0], weights[i] / left))
        left -= weights[i]
    return parts


def _parsed(text: bytes, where: str) -> Any:
    try:
        return json.loads(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where}: not UTF-8 at byte {error.start}; save the file as UTF-8"
        ) from None
    except json.JSONDecodeError as error:
        place = f"column {error.colno}" + f" of line {error.lineno}" * (error.lineno > 1)
        raise UserError(f"{where}: not JSON: {error.msg} at {place}; one object a line") from None
    except (ValueError, RecursionError) as error:  # a number or a nesting without end
        raise UserError(f"{where}: not a row: {error}; one flat object a line") from None


def _row(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise UserError(f"{where}: a row must be a JSON object, not {type(row).__name__}")
    return _plain(row, where) if "\\ud" in ascii(row) else row


def _text(value: Any) -> Any:
    """Return what JSON has for a value of a column; raise ValueError or TypeError for others."""
    if isinstance(value, bytes):
        return value.decode()
    if hasattr(value, "tolist"):  # numpy's
        return value.tolist()
    if hasattr(value, "isoformat") or type(value).__module__ in ("datetime", "decimal", "uuid"):
        return str(value)
    raise TypeError(f"{type(value).__name__} is no text")


def _plain(row: Any, where: str, default: Callable[[Any], Any] | None = _text) -> Row:
    """Return a row of JSON values, as checkpoints hold; `default` makes them of other objects."""
    try:
        plain = json.loads(json.dumps({**row}, default=default))
        if "\\ud" in ascii(plain):  # perhaps half of a surrogate pair, which no tokenizer takes
            json.dumps(plain, ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        wanted = "a dict of texts, numbers, lists and dicts, which checkpoints hold"
        raise UserError(f"{where} is not {wanted}: {error}") from None
    return plain


def _check_keys(row: Row, where: str, wanted: Iterable[str], options: Mapping[str, str]) -> None:
    for key in wanted:
        if key not in row:
            keys = ", ".join(map(repr, row)) or "no keys at all"
            remedy = f"set {options[key]}" if key in options else "rename one"
            raise UserError(f"{where}: the row has no {key!r}, only {keys}; add it or {remedy}")


def _said(given: Any, what: str) -> Any:
    """Return a text, or chat messages whose contents are texts, joined of their parts."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise UserError(f"{what} must be text or a list of messages, got {given!r}")
    found = [{**message} if isinstance(message, dict) else {} for message in given]
    for n, message in enumerate(found, 1):
        if isinstance(parts := message.get("content"), list):
            with suppress(TypeError, KeyError):
                message["content"] = "".join(part["text"] for part in parts)
        if not all(isinstance(message.get(key), str) for key in ("role", "content")):
            got = repr(given[n - 1])[:80]
            raise UserError(f"{what}: message {n} must have texts `role` and `content`, got {got}")
        if message["role"] not in _ROLES:
            roles, role = ", ".join(_ROLES), message["role"]
            raise UserError(f"{what}: message {n} has role {role!r}; use one of {roles}")
    return found


def _check_question(question: Any, what: str) -> None:
    """Raise UserError unless it is text, or chat messages that the model can answer."""
    if isinstance(question, str) and not question.strip():
        raise UserError(f"{what} must be text or a list of messages, got {question!r}")
    if not question or (isinstance(question, list) and question[-1]["role"] == "assistant"):
        raise UserError(f"{what} must end with a message to answer, not with the assistant's own")


def _default_config(names: Sequence[str]) -> str | None:
    return next(
        (name for name in ("default", "main") if name in names), names[0] if names else None
    )


def _nearest(path: Path) -> str:
    """Return a remedy for a path that does not exist."""
    folder = path.parent
    if not folder.is_dir():
        return f"; the directory {folder} does not exist either"
    names = sorted(p.name for p in folder.iterdir())
    near = difflib.get_close_matches(path.name, names, n=1)
    files = [name for name in names if name.lower().endswith(FORMATS)]
    if near:
        return f"; did you mean {folder / near[0]}?"
    return f"; {folder} holds {', '.join(files[:5])}" if files else f"; no .jsonl file in {folder}"
