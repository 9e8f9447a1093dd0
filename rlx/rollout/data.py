"""Read dataset rows from files, the hub or users' code, and put them in training order.

A row is a dict of JSON values with a question (text, or chat messages) and usually an answer.
Reward functions get all of it. Errors name file and line, or row.
"""

import csv
import functools
import hashlib
import inspect
import io
import itertools
import json
import math
import re
import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlx.base import UserError, explained, nearest, packages_of
from rlx.cli import user_code
from rlx.environments import openenv_tasks, reasoning_tasks, textarena_tasks, verifiers_tasks
from rlx.rollout import arithmetic, shapes
from rlx.rollout.images import RowImages, data_uri, is_image, with_column

Row = dict[str, Any]

MOST_ROWS = 1_000_000  # from a user's own code, which may never end
_NONE: Mapping[str, Any] = {}
_ROLES = ("system", "developer", "user", "assistant", "tool")
_CODE = re.compile(r".+\.py:\w+|[\w.]+:\w+")
PLAYERS = (openenv_tasks, textarena_tasks, verifiers_tasks)  # an agent plays their rows
_SCHEMES = {  # → (rest of the source) → (split) → rows
    "reasoning_gym:": functools.partial(functools.partial, reasoning_tasks.rows),
    **{each.SCHEME: functools.partial(functools.partial, each.rows) for each in PLAYERS},
}
GENERATED = {"arithmetic": arithmetic.problems, "shapes": shapes.problems}

_HUB_NAME = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?P<options>(:[\w.+\[\]%-]+){0,2})")


def load(
    source: str,
    question_key: str = "question",  # of each row's text or chat messages; "": not checked
    answer_key: str = "answer",  # of the answer that rewards compare with; "": none
    *,
    texts: Mapping[str, str] = _NONE,  # keys of other required texts or messages → their options
    needed: Iterable[str] = (),  # keys of other required values
    split: str = "train",  # of a hub data set whose name has none, or a function that takes one
    most: int | None = None,  # rows; None: all
    images: RowImages | None = None,  # what keeps the rows' images; None: they must have none
) -> list[Row]:
    """Return the rows of a file, a hub data set or a user's code; `answer` holds `answer_key`.

    A source is a path, `owner/name`, `owner/name:split`, `owner/name:config:split`, FILE.py:name,
    module:name, or begins with one of `_SCHEMES`. Files are .csv, .parquet, else .jsonl or a JSON
    array. UserError for a missing file, a bad row, an unreachable or unknown data set.
    """
    options = {question_key: "data.question_key", answer_key: "data.answer_key", **texts}
    required = dict.fromkeys([*filter(None, options), *needed])
    rows, folder = [], Path(source).parent if Path(source).is_file() else Path()
    for where, row in itertools.islice(_rows(source, split), most):
        _check_keys(row, where, required, options)
        if images and question_key and row.get(images.column):
            row[question_key] = with_column(row[question_key], row.pop(images.column), where)
        for key in filter(None, (question_key, *texts)):
            row[key] = _text_or_messages(row[key], f"{where}: {key!r}", images, folder)
        if question_key:
            _check_question(row[question_key], f"{where}: {question_key!r}")
        rows.append({**row, "answer": row[answer_key]} if answer_key else row)
    if not rows:
        raise UserError(f"{source} has no rows; give another file, or another split")
    return rows


def generated_rows(
    kind: str, seed: int, split: str, n: int, images: RowImages | None = None
) -> list[Row]:
    """Return `n` rows of a key of GENERATED, whose images are then in the store of `images`."""
    rows = GENERATED[kind](seed, split, n)
    if images:
        for row in rows:
            row["question"] = _text_or_messages(row["question"], kind, images, Path())
    return rows


class Source(NamedTuple):
    """Rows of one place, and their weight among the sources of a run."""

    name: str
    rows: list[Row]
    weight: float = 1.0


def named_sources(options: Any) -> list[tuple[str, float]]:
    """Return name and weight of each source in `config.data`; none if rows are generated."""
    if options.dataset and options.mix:
        raise UserError("data.dataset and data.mix are both set; list data.dataset in data.mix")
    if options.dataset or options.mix:
        return [tuple(entry) for entry in options.mix] or [(options.dataset, 1.0)]
    if options.kind in GENERATED and options.train:
        raise UserError(
            f"data.train={options.train} is unused, because data.kind={options.kind} generates "
            "rows; set data.kind=jsonl"
        )
    if options.kind not in GENERATED and not options.train:
        raise UserError("data.train is empty; give a .jsonl file or a hub name")
    return [(options.train, 1.0)] if options.train else []


def is_code(source: str) -> bool:
    """Return whether a source is code: FILE.py:name, module:name, or a name of `_SCHEMES`."""
    return source.startswith(tuple(_SCHEMES)) or bool(_CODE.fullmatch(source))


def _rows(source: str, split: str) -> Iterator[tuple[str, Row]]:
    """Yield place and row of a source, in order."""
    path = Path(source)
    if is_code(source):
        return _own_rows(source, split)
    hub = _HUB_NAME.fullmatch(source) and not path.parent.is_dir()
    if hub and not path.exists() and path.suffix.lower() not in _READERS:
        return _hub_rows(source, split)
    with explained(f"cannot read {path}", "give a .jsonl file"):
        if not path.exists():
            raise UserError(f"no file {path}{_nearest(path)}")
        content = path.read_bytes()
    return _READERS.get(path.suffix.lower(), _json_lines)(content, path)


def takes_split(source: str) -> bool:
    """Return whether a source is a function that takes `split`, so that it has held-out rows."""
    dataset = user_code.find("dataset", source, _SCHEMES)
    return callable(dataset) and "split" in inspect.signature(dataset).parameters


def _own_rows(source: str, split: str) -> Iterator[tuple[str, Row]]:
    """Yield place and row of a user's iterable, or of the one that a user's function returns."""
    dataset, n = user_code.find("dataset", source, _SCHEMES), 0
    try:
        kwargs = {"split": split} if takes_split(source) else {}
        for n, row in enumerate(dataset(**kwargs) if callable(dataset) else dataset, 1):
            if n > MOST_ROWS:
                raise UserError(
                    f"{source} yields more than {MOST_ROWS:,} rows, and a run reads all of them as "
                    "it starts; limit it, for example by itertools.islice"
                )
            yield f"{source}, row {n}", _plain(row, f"{source}, row {n}")
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        why = user_code.where(error, dataset)
        raise UserError(f"{source} gives no row {n + 1}: {why}") from error


def _json_lines(content: bytes, path: Path) -> Iterator[tuple[str, Row]]:
    """Yield place and row of a file of JSON objects, one per line or in one array."""
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
        names = table.fieldnames or ()
        if twice := [name for name in names if name and [*names].count(name) > 1]:
            raise UserError(f"{path}: the header has {twice[0]!r} twice; rename one column")
        for row in table:
            where = f"{path}:{table.line_num}"
            if None in row or None in row.values():
                problem = f"{where}: the row has more or fewer fields than the header"
                raise UserError(f"{problem}; correct it, and quote texts that hold commas")
            yield where, row
    except (csv.Error, UnicodeDecodeError) as error:
        line = table.reader.line_num
        raise UserError(f"{path}:{line} is not CSV: {error}; correct it, in UTF-8") from None


def _parquet(content: bytes, path: Path) -> Iterator[tuple[str, Row]]:
    """Yield place and row of a Parquet file, by the `pyarrow` package."""
    with packages_of("parquet", f"reading {path}, which is not a .jsonl file, needs pyarrow"):
        from pyarrow import ArrowException, parquet
    n = 0
    try:
        batches = parquet.ParquetFile(io.BytesIO(content)).iter_batches()
        for n, row in enumerate((row for batch in batches for row in batch.to_pylist()), 1):
            yield f"{path}, row {n}", _plain(row, f"{path}, row {n}")
    except (ArrowException, OSError) as error:
        raise UserError(f"{path} is not Parquet after row {n}: {error!r:.200}") from None


_READERS = {".jsonl": _json_lines, ".json": _json_lines, ".csv": _csv, ".parquet": _parquet}
FORMATS = tuple(_READERS)


def _hub_rows(source: str, split: str) -> Iterator[tuple[str, Row]]:
    """Yield place and row of a Hugging Face data set, by the `datasets` package."""
    problem = "is not the path of a .jsonl file, and reading it from the hub needs datasets"
    with packages_of("hub", f"{source} {problem}"):
        import datasets
    name, *options = source.split(":")
    split = options[-1] if options else split
    config = options[0] if len(options) == 2 else None
    try:
        if not config and (configs := datasets.get_dataset_config_names(name)):
            config = next((usual for usual in ("default", "main") if usual in configs), configs[0])
        rows = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # the package raises dozens of kinds; each line says why
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise UserError(
            f"cannot load {source} ({name}, config {config or 'default'}, split {split}) from the "
            f"hub: {reason}; check name and network, or give the path of a .jsonl file"
        ) from error
    for n, row in enumerate(rows, 1):
        yield f"{source}, row {n}", _plain(row, f"{source}, row {n}")


class Cursor:
    """An endless sequence of rows; the order of an epoch is a function of (seed, epoch).

    Place p, from 0, is row p mod N of epoch ⌊p/N⌋. A prompt's group_id is its position: the number
    of rows drawn before it. Position and place differ where rows are passed over: those whose last
    group taught nothing are drawn at a share of their places only (`shares`).

    Several sources share the places by weight, and each has its own epochs. The one with the
    largest weight gets ⌈p·w₁⌉ of the first p places, the next one its share of the rest, and so
    on. At any p, each of K sources has its exact share to within 1 + ln K.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        seed: int = 0,
        shuffle: bool = True,
        mix: Sequence[tuple[int, float]] = (),  # rows and weight of each source; empty: one source
        shares: Mapping[str, float] = _NONE,  # "easy", "hard" → share of places, (0, 1]
    ):
        if not rows:
            raise UserError("the dataset has no rows; it needs at least one")
        self._mix = [list(part) for part in mix] if len(mix) > 1 else []
        self._parts = _parts(mix or [(len(rows), 1.0)])
        self._rows, self._seed, self._shuffle, self._shares = rows, seed, shuffle, shares
        # An epoch's stragglers need the order of the epoch before.
        self._order = functools.lru_cache(3 * len(self._parts))(self._shuffled)
        self.position = self.place = 0  # of the next draw
        self._drawn: dict[int, int] = {}  # position → row, where place and position differed
        self._pools: dict[int, str] = {}  # row → easy or hard, by its last group

    def next(self) -> tuple[int, Mapping[str, Any]]:
        """Return (position, row) and move on."""
        while not self._due(row := self._at(self.place)):
            self.place += 1
        if self.place != self.position:
            self._drawn[self.position] = row
        self.position, self.place = self.position + 1, self.place + 1
        return self.position - 1, self._rows[row]

    def row(self, position: int) -> Mapping[str, Any]:
        """Return the row at `position` ≥ 0."""
        return self._rows[self.index(position)]

    def index(self, position: int) -> int:
        """Return the index, from 0, of the dataset's row at `position` ≥ 0."""
        return self._drawn[position] if position in self._drawn else self._at(position)

    def drawn(self, position: int) -> dict[str, int]:
        """Return what the journal notes of a draw: nothing where the position says it all."""
        rows = self._drawn
        return {"row": rows[position], "place": self.place} if position in rows else {}

    @property
    def adapts(self) -> bool:
        """Return whether rows are drawn by how their last groups went."""
        return any(share < 1 for share in self._shares.values())

    def note_pool(self, position: int, pool: str) -> int:
        """Note the pool of a row, by its last group: easy, hard, or ""; return the row's index."""
        self._pools[row := self.index(position)] = pool
        return row

    def forget(self, positions: Iterable[int]) -> None:
        """Forget the rows at positions that are done with."""
        for position in positions:
            self._drawn.pop(position, None)

    def forget_all_but(self, positions: Container[int]) -> None:
        """Forget the rows at other positions than these."""
        self.forget([position for position in self._drawn if position not in positions])

    def _due(self, row: int) -> bool:
        share = self._shares.get(self._pools.get(row, ""), 1.0)
        return share >= 1 or np.random.default_rng([self._seed, self.place, 1]).random() < share

    def _at(self, place: int) -> int:
        for part in self._parts:
            before = math.ceil(place * part.share)
            if math.ceil((place + 1) * part.share) > before:
                epoch, place = divmod(before, part.size)
                return part.first + int(self._order(part, epoch)[place])
            place -= before
        raise AssertionError("the last part takes all that is left")

    def state_dict(self) -> dict[str, Any]:
        """Return a JSON-able state."""
        return {
            "position": self.position, "place": self.place,
            "drawn": [list(pair) for pair in self._drawn.items()],
            "pools": [[row, pool] for row, pool in self._pools.items() if pool],
            "seed": self._seed, "shuffle": self._shuffle, "mix": self._mix,
            "rows": len(self._rows), "digest": self._digest,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any], allow_change: bool = False) -> str:
        """Continue from a `state`; return how the rows changed, or "".

        A difference is a UserError, unless it is in the rows and `allow_change` is set. Unfinished
        prompts then use the rows that are now at their positions.
        """
        current, changed = self.state_dict(), ""
        for key, what in (
            ("seed", "seed"), ("shuffle", "data.shuffle"), ("rows", "number of rows"),
            ("digest", "dataset's content"), ("mix", "rows and weights of data.mix"),
        ):  # fmt: skip
            if current[key] == state.get(key, []):  # older states have no mix
                continue
            numbers = f"{state.get(key)} before, {current[key]} now"
            message = f"the {what} changed since the checkpoint ({numbers})"
            of_rows = key in ("rows", "digest", "mix")
            if not (of_rows and allow_change):
                remedy = ", set data.allow_change=True" if of_rows else ""
                raise UserError(f"{message}; change it back{remedy}, or start in a fresh --workdir")
            changed = changed or message
        self.position = int(state["position"])
        self.place = int(state.get("place", self.position))  # older states have none
        self._drawn = {int(p): int(row) % len(self._rows) for p, row in state.get("drawn", ())}
        self._pools = {} if changed else {int(row): pool for row, pool in state.get("pools", ())}
        return changed

    def _shuffled(self, part: "_Part", epoch: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(part.size)
        seeds = [self._seed, epoch, *([part.number] if part.number else [])]
        return np.random.default_rng(seeds).permutation(part.size)

    @functools.cached_property
    def _digest(self) -> str:
        digest = hashlib.blake2b(digest_size=8)
        for row in self._rows:
            digest.update(json.dumps(row, sort_keys=True).encode())
        return digest.hexdigest()


class _Part(NamedTuple):
    """A source of a cursor: `size` rows from index `first` on."""

    number: int
    first: int
    size: int
    share: Fraction  # of the positions that earlier parts leave; 1 for the last


def _parts(mix: Sequence[tuple[int, float]]) -> list[_Part]:
    """Return the parts of a mix, heaviest first."""
    weights = [Fraction(str(weight)) for _, weight in mix]  # str: 0.1 is exactly 1/10
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
        raise UserError(f"{where}: not UTF-8 at byte {error.start}; save it as UTF-8") from None
    except json.JSONDecodeError as error:
        place = f"column {error.colno}" + f" of line {error.lineno}" * (error.lineno > 1)
        what = f"not JSON: {error.msg} at {place}; write one object per line"
        raise UserError(f"{where}: {what}") from None
    except (ValueError, RecursionError) as error:  # a number too long, or nesting too deep
        raise UserError(f"{where}: not a row ({error}); write one flat object per line") from None


def _row(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise UserError(f"{where}: a row must be a JSON object, not {type(row).__name__}")
    return _plain(row, where) if "\\ud" in ascii(row) else row


def _text(value: Any) -> Any:
    """Return a value as JSON's closest type, for json.dumps."""
    if (uri := data_uri(value)) is not None:
        return uri
    if isinstance(value, bytes):
        return value.decode()
    if hasattr(value, "tolist"):  # numpy's
        return value.tolist()
    if hasattr(value, "isoformat") or type(value).__module__ in ("datetime", "decimal", "uuid"):
        return str(value)
    raise TypeError(f"{type(value).__name__} is not text")


def _plain(row: Any, where: str) -> Row:
    """Return a row of JSON values, which checkpoints can hold."""
    try:
        plain = json.loads(json.dumps({**row}, default=_text))
        if "\\ud" in ascii(plain):  # maybe half a surrogate pair, which tokenizers reject
            json.dumps(plain, ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        form = "a dict of texts, numbers, lists and dicts, as checkpoints need"
        raise UserError(f"{where} is not {form}: {error}") from None
    return plain


def _check_keys(row: Row, where: str, required: Iterable[str], options: Mapping[str, str]) -> None:
    for key in required:
        if key not in row:
            keys = ", ".join(map(repr, row)) or "no keys at all"
            remedy = f"set {options[key]}" if key in options else "rename one"
            raise UserError(f"{where}: the row has no {key!r}, only {keys}; add it or {remedy}")


def _text_or_messages(value: Any, what: str, images: RowImages | None, folder: Path) -> Any:
    """Return a text, or chat messages whose contents are texts, or parts if there are images."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise UserError(f"{what} must be text or a list of messages, got {value!r}")
    messages = [{**message} if isinstance(message, dict) else {} for message in value]
    for n, message in enumerate(messages, 1):
        where = f"{what}: message {n}"
        message["content"] = _content(message.get("content"), where, images, folder)
        if message["content"] is None or not isinstance(message.get("role"), str):
            got = repr(value[n - 1])[:80]
            raise UserError(f"{where} must have texts `role` and `content`, got {got}")
        if (role := message["role"]) not in _ROLES:
            raise UserError(f"{where} has role {role!r}; use one of {', '.join(_ROLES)}")
    return messages


def _content(content: Any, what: str, images: RowImages | None, folder: Path) -> str | list | None:
    """Return a message's text, or its parts if one is an image; None for anything else."""
    if isinstance(content, str):
        return content
    with suppress(TypeError, KeyError):
        if images and any(map(is_image, content)):
            return images.put(content, folder, what)
        return "".join(part["text"] for part in content)
    return None


def _check_question(question: Any, what: str) -> None:
    """Raise UserError unless a question is text, or messages that the model can answer."""
    if isinstance(question, str) and not question.strip():
        raise UserError(f"{what} must be text or a list of messages, got {question!r}")
    if not question or (isinstance(question, list) and question[-1]["role"] == "assistant"):
        raise UserError(f"{what} must end with a message to answer, not with the assistant's own")


def _nearest(path: Path) -> str:
    """Return a remedy for a path that does not exist, to follow its name."""
    folder = path.parent
    if not folder.is_dir():
        return f"; the directory {folder} does not exist either"
    names = sorted(p.name for p in folder.iterdir())
    near = nearest(path.name, names)
    files = [name for name in names if name.lower().endswith(FORMATS)]
    if near:
        return f"; did you mean {folder / near}?"
    return f"; {folder} holds {', '.join(files[:5])}" if files else f"; no .jsonl file in {folder}"
