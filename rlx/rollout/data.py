"""Read dataset rows from a file or the hub, and deal them out.

A row is a dict of JSON values with a question (text, or chat messages) and mostly an answer;
whatever else it holds reaches the reward function too. Every mistake in a file is an error that
names file and line, or row.
"""

import csv
import difflib
import hashlib
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlx.base import UserError, install
from rlx.rollout.workflows import Overlong

Row = dict[str, Any]

_NONE: Mapping[str, str] = {}
_ROLES = ("system", "developer", "user", "assistant", "tool")
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
    """Return the rows of a file or of a hub data set; `answer` is what `answer_key` names.

    Args:
      source: a path, or `owner/name`, `owner/name:split`, `owner/name:config:split`. A file is read
        by its suffix: .csv, .parquet, others as .jsonl.
      question_key: key of each row's text or chat messages; not looked at if empty.
      answer_key: key of the answer that rewards compare with; every row has it, unless empty.
      texts: keys of further texts that every row has → the option that names each.
      needed: keys of whatever else every row has.
      split: of a hub data set whose name gives none.

    Raises:
      UserError: a missing file, a bad row, an unreachable or unknown data set.
    """
    options = {question_key: "data.question_key", answer_key: "data.answer_key", **texts}
    wanted = dict.fromkeys([*filter(None, options), *needed])
    rows = []
    for where, row in _rows(source, split):
        _check_keys(row, where, wanted, options)
        for key in texts:
            if not isinstance(row[key], str):
                raise UserError(f"{where}: {key!r} must be text, got {row[key]!r}")
        if question_key:
            _check_question(row[question_key], f"{where}: {question_key!r}")
        rows.append({**row, "answer": row[answer_key]} if answer_key else row)
    if not rows:
        raise UserError(f"{source} has no rows; give another file, or another split")
    return rows


def fitting(
    rows: Sequence[Row], name: str, check: Callable[[Row, str], None], overlong: str
) -> list[Row]:
    """Return the rows that pass `check`, which takes a row and its name.

    Args:
      overlong: error: a row that is too long is a mistake; skip: it is left out.

    Raises:
      UserError: of the first row that does not pass; with skip, all of them are too long.
    """
    found: list[Row] = []
    last = None
    for index, row in enumerate(rows):
        try:
            check(row, f"row {index + 1} of {name}")
            found.append(row)
        except Overlong as error:
            if overlong != "skip":
                raise
            last = error
    if last and not found:
        raise UserError(f"data.overlong=skip leaves no row of {name}: {last}")
    return found


def _rows(source: str, split: str) -> Iterator[tuple[str, Row]]:
    """Yield place and row of a source, in order."""
    path = Path(source)
    hub = _HUB_NAME.fullmatch(source) and not path.parent.is_dir()
    if hub and not path.exists() and path.suffix not in _READERS:
        return _hub_rows(source, split)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"no file {path}{_nearest(path)}") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; give a .jsonl file") from None
    return _READERS.get(path.suffix, _json_lines)(content, path)


def _json_lines(content: bytes, path: Path) -> Iterator[tuple[str, Row]]:
    """Yield `FILE:LINE` and the row of each line of a file with one JSON object a line."""
    if not content.strip():
        raise UserError(f"{path} is empty; it needs one JSON object a line")
    lines = content.removeprefix(b"\xef\xbb\xbf").removesuffix(b"\n").split(b"\n")
    for n, line in enumerate(lines, 1):
        yield f"{path}:{n}", _row(line, f"{path}:{n}")


def _csv(content: bytes, path: Path) -> Iterator[tuple[str, Row]]:
    """Yield `FILE:LINE` and row of a table with a header; every value is text."""
    text = io.TextIOWrapper(io.BytesIO(content), "utf-8-sig", newline="")
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
                yield f"{path}, row {n}", _plain(row)
    except (ArrowException, OSError) as error:
        words = " ".join(str(error).split())[:200]
        raise UserError(f"{path}, after row {n}: not Parquet: {words}; write it again") from None


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
        yield f"{source}, row {n}", _plain(row)


class Cursor:
    """An endless sequence of rows; the order of an epoch is a function of (seed, epoch).

    Position p, from 0, is row p mod N of epoch ⌊p/N⌋. A prompt's group_id is its position, so
    a restored run finds the row of any prompt again.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], seed: int = 0, shuffle: bool = True):
        if not rows:
            raise UserError("the dataset has no rows; it needs at least one")
        self._rows = rows
        self._seed = seed
        self._shuffle = shuffle
        self._orders: dict[int, np.ndarray] = {}
        self._digest: str | None = None
        self.position = 0

    def __len__(self) -> int:
        """Return the rows of an epoch."""
        return len(self._rows)

    @property
    def epoch(self) -> int:
        """Return the epoch that the next row belongs to, from 0."""
        return self.position // len(self._rows)

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
        epoch, place = divmod(position, len(self._rows))
        return int(self._order(epoch)[place])

    def state_dict(self) -> dict[str, Any]:
        """Return JSON-able state for `load_state_dict`."""
        return {
            "position": self.position,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "rows": len(self._rows),
            "digest": self._content(),
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
        ):
            if mine[key] == state[key]:
                continue
            found = (
                f"the {what} changed since the checkpoint ({state[key]} before, {mine[key]} now)"
            )
            of_rows = key in ("rows", "digest")
            if not (of_rows and allow_change):
                remedy = ", set data.allow_change=True" if of_rows else ""
                raise UserError(f"{found}; change it back{remedy}, or start in a fresh --workdir")
            changed = changed or found
        self.position = int(state["position"])
        return changed

    def _order(self, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            if len(self._orders) > 2:  # an epoch's stragglers need the one before, no more
                self._orders.pop(min(self._orders))
            n = len(self._rows)
            rng = np.random.default_rng([self._seed, epoch])
            self._orders[epoch] = rng.permutation(n) if self._shuffle else np.arange(n)
        return self._orders[epoch]

    def _content(self) -> str:
        """Return a digest of all rows, computed once: rows do not change during a run."""
        if self._digest is None:
            digest = hashlib.blake2b(digest_size=8)
            for row in self._rows:
                digest.update(json.dumps(row, sort_keys=True, default=str).encode())
            self._digest = digest.hexdigest()
        return self._digest


def _row(line: bytes, where: str) -> Row:
    if not line.strip():
        raise UserError(f"{where}: the line is empty; remove it")
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where}: not UTF-8 at byte {error.start}; save the file as UTF-8"
        ) from None
    except json.JSONDecodeError as error:
        raise UserError(
            f"{where}: not JSON: {error.msg} at column {error.colno}; one object a line"
        ) from None
    except (ValueError, RecursionError) as error:  # a number or a nesting without end
        raise UserError(f"{where}: not a row: {error}; one flat object a line") from None
    if not isinstance(row, dict):
        raise UserError(f"{where}: a row must be a JSON object, not {type(row).__name__}")
    return row


def _plain(row: Mapping[str, Any]) -> Row:
    """Return a row of JSON values: dates and bytes, which checkpoints cannot hold, as texts."""
    return json.loads(json.dumps(dict(row), default=str))


def _check_keys(row: Row, where: str, wanted: Iterable[str], options: Mapping[str, str]) -> None:
    for key in wanted:
        if key not in row:
            keys = ", ".join(map(repr, row)) or "no keys at all"
            remedy = f"set {options[key]}" if key in options else "rename one"
            raise UserError(f"{where}: the row has no {key!r}, only {keys}; add it or {remedy}")


def _check_question(question: Any, what: str) -> None:
    """Raise UserError unless it is text, or chat messages that the model can answer."""
    if not isinstance(question, list):
        if not isinstance(question, str) or not question.strip():
            raise UserError(f"{what} must be text or a list of messages, got {question!r}")
        return
    for n, message in enumerate(question, 1):
        found = message if isinstance(message, dict) else {}
        if not all(isinstance(found.get(key), str) for key in ("role", "content")):
            got = repr(message)[:80]
            raise UserError(f"{what}: message {n} must have texts `role` and `content`, got {got}")
        if found["role"] not in _ROLES:
            roles, role = ", ".join(_ROLES), found["role"]
            raise UserError(f"{what}: message {n} has role {role!r}; use one of {roles}")
    if not question or question[-1]["role"] == "assistant":
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
    files = [name for name in names if name.endswith(FORMATS)]
    if near:
        return f"; did you mean {folder / near[0]}?"
    return f"; {folder} holds {', '.join(files[:5])}" if files else f"; no .jsonl file in {folder}"
