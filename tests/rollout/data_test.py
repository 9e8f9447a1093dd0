"""Files with every kind of mistake, the hub's absence, and the cursor."""

import csv
import datetime
import decimal
import importlib.util
import io
import json
import os
import subprocess
import sys
import types
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.base import UserError
from rlx.rollout import data
from rlx.rollout.data import Cursor

GOOD = '{"question": "1+1?", "answer": "2"}'


@pytest.fixture
def write(tmp_path):
    def to(content, name="train.jsonl"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return to


def test_rows_keep_order_extra_keys_and_any_text(write):
    rows = [
        {"question": "a\u2028b\u00e9 \U0001d7db", "answer": "1", "level": 3},
        {"question": "c", "answer": 2},
    ]
    path = write("\n".join(json.dumps(r, ensure_ascii=False) for r in rows) + "\n")
    assert data.load(str(path)) == rows
    assert data.load(str(write("\ufeff" + GOOD + "\r\n" + GOOD)))[1]["answer"] == "2"


def test_other_keys(write):
    path = write('{"problem": "p", "solution": "s"}\n')
    (row,) = data.load(str(path), "problem", "solution")
    assert row == {"problem": "p", "solution": "s", "answer": "s"}, "rewards get answer="
    assert data.load(str(path), "problem", "") == [{"problem": "p", "solution": "s"}]
    with pytest.raises(UserError, match=r":1: the row has no 'level', only 'problem', 'solution'"):
        data.load(str(path), "problem", "", needed=["level"])


@pytest.mark.parametrize(
    ("second_line", "message"),
    [
        ('{"question": "x", "answer": }', "not JSON: Expecting value at column 29"),
        ('{"question": "x"', "not JSON"),
        (
            '{"question": [{"role": "user", "content": [{"image": 1}]}], "answer": ""}',
            "message 1 must have texts",
        ),
        ("[1, 2]", "must be a JSON object, not list"),
        ("null", "must be a JSON object, not NoneType"),
        ('{"answer": "2"}', "has no 'question', only 'answer'; add it or set data.question_key"),
        (
            '{"question": "x", "anwser": "2"}',
            "has no 'answer', only 'question', 'anwser'; add it or set data.answer_key",
        ),
        ("{}", "only no keys at all"),
        ('{"question": 5, "answer": "2"}', "'question' must be text or a list of messages, got 5"),
        ('{"question": " ", "answer": "2"}', "'question' must be text"),
        ('{"question": [], "answer": "2"}', "'question' must end with a message to answer"),
        ('{"question": ["hi"], "answer": "2"}', "'question': message 1 must have texts `role`"),
        (
            '{"question": [{"role": "user", "content": "a"}, {"role": "asistant", "content": "b"}],'
            ' "answer": "2"}',
            "'question': message 2 has role 'asistant'; use one of system, developer, user",
        ),
        (
            '{"question": [{"role": "assistant", "content": "a"}], "answer": "2"}',
            "must end with a message to answer, not with the assistant's own",
        ),
        (b'{"question": "\xff", "answer": "2"}', "not UTF-8 at byte 14"),
        ('{"question": "x", "answer": ' + "9" * 5000 + "}", "not a row ("),
        ("[" * 100_000, "not a row ("),
    ],
)
def test_a_bad_line_is_named(write, second_line, message):
    if isinstance(second_line, str):
        second_line = second_line.encode()
    path = write(GOOD.encode() + b"\n" + second_line + b"\n" + GOOD.encode() + b"\n")
    with pytest.raises(UserError) as error:
        data.load(str(path))
    text = str(error.value)
    assert text.startswith(f"{path}:2: ")
    assert message in text
    assert "\n" not in text


@pytest.mark.parametrize("content", ["", "\n", "  \n\n"])
def test_an_empty_file(write, content):
    with pytest.raises(UserError, match=r"train.jsonl is empty; it needs one JSON object a line"):
        data.load(str(write(content)))


def test_empty_lines_are_passed_over_and_counted(write):
    path = write("\n" + GOOD + "\n\n  \r\n" + GOOD + "\n\n{}\n")
    with pytest.raises(UserError, match=r"train.jsonl:7: the row has no 'question'"):
        data.load(str(path))
    assert len(data.load(str(write("\n" + GOOD + "\n \n" + GOOD + "\n\n")))) == 2


@pytest.mark.parametrize("text", ["\\ud83d", "\\uDE00 a", "\\ude00\\ud83d"])
def test_half_of_a_surrogate_pair_is_refused_with_its_row(write, text):
    whole = '{"question": "\\ud83d\\ude00 C:\\\\ud", "answer": "2"}'
    (row,) = data.load(str(write(whole)))
    assert row["question"] == "\U0001f600 C:\\ud"
    bad = whole.replace("2", text)
    with pytest.raises(UserError, match=r"train.jsonl:2 is not .* can't encode character"):
        data.load(str(write(whole + "\n" + bad)))
    with pytest.raises(UserError, match=r"x.json, row 2 is not .* can't encode character"):
        data.load(str(write(f"[{whole}, {bad}]", "x.json")))


@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_of_rows_is_read_and_its_rows_are_counted(write, indent):
    rows = [{"question": "a [", "answer": "\u00e9"}, {"question": "b"}, 5]
    text = json.dumps(rows[:1] * 3, indent=indent)
    assert data.load(str(write(" \n" + text, "x.json"))) == rows[:1] * 3
    with pytest.raises(UserError, match=r"x.json, row 2: the row has no 'answer', only 'question'"):
        data.load(str(write(json.dumps(rows, indent=indent), "x.json")))
    with pytest.raises(UserError, match=r"x.json, row 3: a row must be a JSON object, not int"):
        data.load(str(write(json.dumps(rows, indent=indent), "x.json")), answer_key="")
    with pytest.raises(UserError, match=r"x.json: not JSON: Expecting ',' delimiter at column \d+"):
        data.load(str(write(text.replace("}, {", "} {").replace("},\n", "}\n"), "x.json")))


@pytest.mark.parametrize("suffix", ["CSV", "Parquet", "JSONL"])
def test_a_suffix_may_be_upper_case(write, suffix):
    path = write(WRITERS[suffix.lower()](FLAT), f"rows.{suffix}")
    assert data.load(str(path)) == FLAT


def test_a_field_may_be_long(write):
    rows = [{"question": "a, " * 100_000, "answer": "1"}]
    assert data.load(str(write(as_csv(rows), "x.csv"))) == rows


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_conversations_are_read_and_parts_of_a_text_are_joined(write, suffix):
    def message(role, *texts):
        return {"role": role, "content": [{"type": "text", "text": text} for text in texts]}

    rows = [
        {"prompt": [message("user", "1 ", "+ 1?")], "chosen": [message("assistant", "2")],
         "rejected": [{"role": "assistant", "content": "3"}] if suffix == "jsonl" else
         [message("assistant", "3")]},
    ]  # fmt: skip
    path = write(WRITERS[suffix](rows), f"rows.{suffix}")
    (found,) = data.load(str(path), "prompt", "", texts={"chosen": "", "rejected": ""})
    assert found == {
        "prompt": [{"role": "user", "content": "1 + 1?"}],
        "chosen": [{"role": "assistant", "content": "2"}],
        "rejected": [{"role": "assistant", "content": "3"}],
    }


def test_a_missing_file_suggests_the_nearest(write, tmp_path):
    write(GOOD)
    with pytest.raises(UserError, match=r"no file .*trian.jsonl; did you mean .*train.jsonl\?"):
        data.load(str(tmp_path / "trian.jsonl"))
    with pytest.raises(UserError, match=r"no file .*; .* holds train.jsonl"):
        data.load(str(tmp_path / "something-else"))
    with pytest.raises(UserError, match=r"the directory .*nowhere does not exist either"):
        data.load(str(tmp_path / "nowhere" / "train.jsonl"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no .jsonl file in"):
        data.load(str(tmp_path / "empty" / "train.jsonl"))


def test_a_directory_is_not_a_file(tmp_path):
    with pytest.raises(UserError, match="cannot read"):
        data.load(str(tmp_path))


FLAT = [{"question": 'a, "b"\n\u00e9', "answer": "1"}, {"question": "c", "answer": "2"}]


def as_csv(rows):
    file = io.StringIO(newline="")
    table = csv.DictWriter(file, rows[0])
    table.writeheader()
    table.writerows(rows)
    return file.getvalue()


def as_parquet(rows):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = io.BytesIO()
    parquet.write_table(arrow.Table.from_pylist(rows), file, row_group_size=1)
    return file.getvalue()


def as_lines(rows):
    return "\n".join(json.dumps(row) for row in rows)


WRITERS = {"jsonl": as_lines, "json": as_lines, "csv": as_csv, "parquet": as_parquet}


@pytest.mark.parametrize("suffix", WRITERS)
def test_every_format_has_the_same_rows_and_keys(write, suffix):
    path = write(WRITERS[suffix](FLAT), f"rows.{suffix}")
    assert data.load(str(path)) == FLAT
    assert data.load(str(path), "answer", "question")[1] == {"question": "c", "answer": "c"}
    with pytest.raises(UserError, match=rf"rows\.{suffix}.*the row has no 'q', only 'question'"):
        data.load(str(path), "q")


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
def test_messages_are_questions_where_columns_can_hold_them(write, suffix):
    rows = [{"messages": [{"role": "user", "content": "1+1?"}], "answer": "2"}]
    path = write(WRITERS[suffix](rows), f"rows.{suffix}")
    assert data.load(str(path), "messages") == rows


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.csv", "", "x.csv has no rows"),
        ("x.csv", "question,answer\n", "x.csv has no rows"),
        (
            "x.csv",
            "question,answer\na,1\nb,2,3\n",
            "x.csv:3: the row has more or fewer fields than the header",
        ),
        (
            "x.csv",
            "question,answer\na,1\nb\n",
            "x.csv:3: the row has more or fewer fields than the header",
        ),
        ("x.csv", 'question,answer\na,1\n"b" c,2\n', "x.csv:3 is not CSV: "),
        ("x.csv", "question,answer,answer\na,1,2\n", "x.csv: the header has 'answer' twice"),
        (
            "x.csv",
            b"question,answer\n\xff,1\n",
            "is not CSV: 'utf-8' codec can't decode byte 0xff in position 16",
        ),
        ("x.parquet", "PAR1 and more", "x.parquet is not Parquet after row 0: "),
    ],
)
def test_mistakes_of_every_format_are_one_line(write, name, content, message):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    with pytest.raises(UserError) as error:
        data.load(str(write(content, name)))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_columns_of_dates_bytes_and_numbers_give_values_that_checkpoints_hold(write):
    row = {"question": b"0+1=?", "answer": b"1", "day": datetime.date(2024, 5, 6),
           "price": decimal.Decimal("1.50"), "at": datetime.time(1, 2), "many": [b"a", b"\xc3\xa9"],
           "deep": {"raw": b"x"}}  # fmt: skip
    (found,) = data.load(str(write(as_parquet([row]), "x.parquet")))
    assert found == {"question": "0+1=?", "answer": "1", "day": "2024-05-06", "price": "1.50",
                     "at": "01:02:00", "many": ["a", "\u00e9"], "deep": {"raw": "x"}}  # fmt: skip


def test_bytes_that_are_no_text_are_refused_with_their_row(write):
    rows = [{"question": "q", "answer": raw} for raw in (b"1", b"\xff")]
    with pytest.raises(
        UserError, match=r"x.parquet, row 2 is not a dict of .*: .*codec.* 0xff"
    ) as e:
        data.load(str(write(as_parquet(rows), "x.parquet")))
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [(np.int64(3), 3), (np.array([1.5, 2]), [1.5, 2]), (np.array([b"a"]), ["a"]), (b"b", "b"),
     (object(), None), ("\ud83d", None)],
)  # fmt: skip
def test_values_of_the_hub_are_json_or_refused_with_their_row(hub, monkeypatch, value, wanted):
    rows = [{"question": "q", "answer": value}]
    monkeypatch.setattr(sys.modules["datasets"], "load_dataset", lambda *_, split: rows)
    if wanted is None:
        with pytest.raises(UserError, match=r"openai/gsm8k, row 1 is not a dict of texts"):
            data.load("openai/gsm8k")
    else:
        assert data.load("openai/gsm8k") == [{"question": "q", "answer": wanted}]


def test_without_pyarrow_the_remedy_is_named(write, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"pip install -e '\.\[parquet\]'"):
        data.load(str(write(b"PAR1", "x.parquet")))


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=60), st.sampled_from(sorted(WRITERS)))
def test_any_bytes_are_rows_or_a_users_mistake(tmp_path_factory, content, suffix):
    path = tmp_path_factory.mktemp("any") / f"x.{suffix}"
    path.write_bytes(content)
    try:
        rows = data.load(str(path))
    except UserError as error:
        message = str(error)
    else:
        message = f"{path} has {len(rows)} rows" if rows else ""
    assert str(path) in message


# The hub. No machine of ours reaches it, so the package's two functions are stood in for.


@pytest.fixture
def hub(monkeypatch):
    """A `datasets` with one set, `openai/gsm8k`, in two configs and two splits."""
    asked = []

    def load_dataset(name, config, *, split):
        asked.append((name, config, split))
        if name != "openai/gsm8k" or split not in ("train", "test"):
            raise ValueError(f"Unknown split {split!r}.\nLong explanation")
        return [{"question": f"{config} {split}", "answer": "#### 1"}]

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset
    module.get_dataset_config_names = lambda name: ["socratic", "main"]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return asked


@pytest.mark.parametrize(
    ("source", "asked"),
    [
        ("openai/gsm8k", ("openai/gsm8k", "main", "train")),
        ("openai/gsm8k:test", ("openai/gsm8k", "main", "test")),
        ("openai/gsm8k:socratic:test", ("openai/gsm8k", "socratic", "test")),
    ],
)
def test_hub_names(hub, source, asked):
    (row,) = data.load(source)
    assert hub == [asked]
    assert row["question"] == f"{asked[1]} {asked[2]}"


def test_hub_split_of_the_caller(hub):
    data.load("openai/gsm8k", split="test")
    assert hub == [("openai/gsm8k", "main", "test")]


def test_hub_errors_are_one_line(hub):
    with pytest.raises(UserError, match=r"split tset.*Unknown split 'tset'\.; check name") as e:
        data.load("openai/gsm8k:main:tset")
    assert "\n" not in str(e.value)


def test_without_the_package_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install -e '\.\[hub\]'"):
        data.load("openai/gsm8k")


@pytest.mark.witnesses  # TRL brings the package
@pytest.mark.skipif(not importlib.util.find_spec("datasets"), reason="no datasets")
def test_the_real_package_offline():
    """In a process of its own: the package reads its environment when imported."""
    code = (
        "from rlx.base import UserError\nfrom rlx.rollout import data\n"
        "try:\n    data.load('openai/gsm8k')\nexcept UserError as e:\n    print('error:', e)"
    )
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": "/nonexistent",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.startswith("error: cannot load openai/gsm8k"), done.stderr[-2000:]
    assert "give the path of a .jsonl file" in done.stdout


# A user's own code.


OWN = """
import datetime
import itertools

import numpy as np


def three(split):
    return ({"question": f"{split} {i}", "answer": (i,)} for i in range(3))


def endless():
    return ({"question": "q", "answer": i} for i in itertools.count())


def breaks():
    yield {"question": "q", "answer": "a"}
    yield {"question": "q", "answer": 1 / 0}


def objects():
    yield {"question": "q", "answer": object()}


def columns():
    yield {"question": b"q", "answer": datetime.date(2024, 5, 6), "sizes": np.array([3, 4])}


def half():
    yield {"question": "q \\ud83d", "answer": "a"}


def none():
    return None


def leaves():
    raise SystemExit(3)


numbers = [{"question": "q", "answer": "a"}, 5]
empty = []
"""


@pytest.fixture
def own(write, monkeypatch):
    monkeypatch.setattr(data, "MOST_ROWS", 1000)
    return write(OWN, "mine.py")


def test_rows_of_a_function_with_splits(own):
    assert data.takes_split(f"{own}:three")
    assert not data.takes_split(f"{own}:endless")
    assert not data.takes_split(f"{own}:numbers")
    assert data.load(f"{own}:three")[2] == {"question": "train 2", "answer": [2]}, "as JSON has it"
    assert data.load(f"{own}:three", split="test")[0]["question"] == "test 0"


def test_rows_of_a_function_are_converted_like_those_of_a_file(own):
    wanted = {"question": "q", "answer": "2024-05-06", "sizes": [3, 4]}
    assert data.load(f"{own}:columns") == [wanted]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("thre", "has no 'thre'; did you mean 'three'?"),
        ("endless", "yields more than 1,000 rows, and a run reads all"),
        ("breaks", "gives no row 2: ZeroDivisionError: division by zero (FILE, line 18)"),
        ("none", "gives no row 1: TypeError: 'NoneType' object is not iterable (FILE, line 33)"),
        ("leaves", "gives no row 1: SystemExit: 3 (FILE, line 38)"),
        ("objects", "dicts, as checkpoints need: object is not text"),
        (
            "half",
            "row 1 is not a dict of texts, numbers, lists and dicts, as checkpoints need: 'ut",
        ),
        ("numbers", "row 2 is not a dict of texts"),
        ("empty", "has no rows"),
    ],
)
def test_mistakes_in_a_user_s_code_are_one_line_with_the_row(own, name, message):
    with pytest.raises(UserError) as error:
        data.load(f"{own}:{name}")
    assert message.replace("FILE", str(own)) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("mine.py:rows", True), ("a/b/mine.py:rows", True), ("package.module:rows", True),
        ("openai/gsm8k:main:test", False), ("openai/gsm8k:test", False), ("rows.jsonl", False),
    ],
)  # fmt: skip
def test_code_is_told_from_hub_names_and_files(source, code):
    assert data.is_code(source) == code


# The cursor.

ROWS = [{"question": str(i), "answer": str(i)} for i in range(10)]


def deal(cursor, n):
    return [cursor.next()[1]["question"] for _ in range(n)]


def test_every_epoch_has_every_row_in_its_own_order():
    epochs = [deal(cursor, 10) for cursor in [Cursor(ROWS, seed=1)] for _ in range(4)]
    assert all(sorted(epoch, key=int) == [str(i) for i in range(10)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert epochs[0] == deal(Cursor(ROWS, seed=1), 10)
    assert epochs[0] != deal(Cursor(ROWS, seed=2), 10)


def test_without_shuffling_rows_come_in_order():
    cursor = Cursor(ROWS, shuffle=False)
    assert deal(cursor, 12) == [str(i % 10) for i in range(12)]
    assert cursor.position == 12


def test_the_row_of_any_position_is_found_again():
    cursor = Cursor(ROWS, seed=4)
    dealt = [cursor.next() for _ in range(55)]
    assert [p for p, _ in dealt] == list(range(55))
    for position in (54, 0, 31, 12, 9, 10):
        assert cursor.row(position) is dealt[position][1]


@given(st.integers(0, 40), st.integers(1, 30))
def test_state_continues_exactly(before, after):
    cursor = Cursor(ROWS, seed=9)
    deal(cursor, before)
    state = json.loads(json.dumps(cursor.state_dict()))
    again = Cursor(ROWS, seed=9)
    again.load_state_dict(state)
    assert deal(again, after) == deal(cursor, after)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["easy", "hard", ""]))),
    st.integers(1, 50),
)
def test_state_continues_exactly_where_rows_are_passed_over(pools, after):
    shares = {"easy": 0.3, "hard": 0.6}
    cursor, again = Cursor(ROWS, seed=9, shares=shares), Cursor(ROWS, seed=9, shares=shares)
    deal(cursor, 10)
    for position, pool in pools:
        cursor.note_pool(position, pool)
    drawn = [cursor.next() for _ in range(9)]
    again.load_state_dict(json.loads(json.dumps(cursor.state_dict())))
    assert all(again.row(position) == row for position, row in drawn)
    assert deal(again, after) == deal(cursor, after)
    cursor.forget_all_but({drawn[0][0]})
    assert cursor.row(drawn[0][0]) == drawn[0][1]


def test_a_run_without_shares_continues_one_with_them():
    cursor, plain = Cursor(ROWS, shares={"easy": 0.01}), Cursor(ROWS)
    deal(cursor, 10)
    for position in range(9):
        cursor.note_pool(position, "easy")
    under_way = [cursor.next() for _ in range(3)]
    plain.load_state_dict(cursor.state_dict())
    assert all(plain.row(position) == row for position, row in under_way)
    counts = Counter(deal(plain, 30))
    assert set(counts.values()) <= {2, 3, 4}
    assert len(counts) == 10


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (Cursor(ROWS[:9], seed=9), "number of rows changed since the checkpoint"),
        (Cursor([{**row, "answer": "?"} for row in ROWS], seed=9), "dataset's content changed"),
        (Cursor(ROWS, seed=8), "the seed changed"),
        (Cursor(ROWS, seed=9, shuffle=False), "data.shuffle changed"),
    ],
)
def test_state_of_other_data_is_refused(other, message):
    with pytest.raises(UserError, match=message):
        other.load_state_dict(Cursor(ROWS, seed=9).state_dict())


def test_other_rows_are_taken_where_that_is_allowed_but_not_another_order():
    state = Cursor(ROWS, seed=9).state_dict() | {"position": 7}
    mended = Cursor([{**row, "answer": "?"} for row in ROWS], seed=9)
    assert "dataset's content changed" in mended.load_state_dict(state, allow_change=True)
    assert mended.position == 7
    fewer = Cursor(ROWS[:9], seed=9)
    assert "number of rows changed" in fewer.load_state_dict(state, allow_change=True)
    assert Cursor(ROWS, seed=9).load_state_dict(state, allow_change=True) == ""
    with pytest.raises(UserError, match="the seed changed"):
        Cursor(ROWS[:9], seed=8).load_state_dict(state, allow_change=True)


WEIGHTS = st.lists(
    st.integers(1, 10_000).map(lambda n: n / 1000), min_size=2, max_size=6
)  # fmt: skip


@given(WEIGHTS, st.integers(0, 5), st.booleans(), st.data())
def test_sources_have_their_shares_of_every_prefix_and_epochs_of_their_own(
    weights, seed, shuffle, draw
):
    counts = [draw.draw(st.integers(1, 5)) for _ in weights]
    rows = [{"source": k, "row": i} for k, count in enumerate(counts) for i in range(count)]
    cursor = Cursor(rows, seed, shuffle, list(zip(counts, weights, strict=True)))
    dealt = [[] for _ in weights]
    bound = sum(1 / k for k in range(1, len(weights) + 1))
    for n in range(1, 120):
        position, row = cursor.next()
        dealt[row["source"]].append(row["row"])
        assert cursor.row(position) is row
        for own, weight in zip(dealt, weights, strict=True):
            assert abs(len(own) - n * weight / sum(weights)) <= bound + 1e-9
    for k, (own, count) in enumerate(zip(dealt, counts, strict=True)):
        for epoch in range(len(own) // count):
            assert sorted(own[epoch * count :][:count]) == list(range(count))
        if k == 0:
            alone = Cursor(rows[:count], seed, shuffle)
            assert own == [alone.row(p)["row"] for p in range(len(own))], "as without the others"


@given(st.integers(0, 60), st.integers(1, 30))
def test_a_mixture_continues_exactly(before, after):
    mix = [(3, 0.7), (7, 0.3)]
    cursor, again = Cursor(ROWS, 9, mix=mix), Cursor(ROWS, 9, mix=mix)
    deal(cursor, before)
    again.load_state_dict(json.loads(json.dumps(cursor.state_dict())))
    assert deal(again, after) == deal(cursor, after)


def test_a_changed_mixture_is_refused_unless_that_is_allowed():
    state = Cursor(ROWS, 9, mix=[(3, 0.7), (7, 0.3)]).state_dict() | {"position": 7}
    other = Cursor(ROWS, 9, mix=[(3, 0.5), (7, 0.5)])
    with pytest.raises(UserError, match=r"weights of data.mix changed .*set data.allow_change"):
        other.load_state_dict(state)
    assert "data.mix changed" in other.load_state_dict(state, allow_change=True)
    assert other.position == 7


def test_a_checkpoint_from_before_there_were_mixtures_is_continued():
    state = Cursor(ROWS, 9).state_dict() | {"position": 12}
    assert state.pop("mix") == []
    assert state["digest"] == "5b0898dfce469d73", "of rows, the same as ever"
    for one in (Cursor(ROWS, 9), Cursor(ROWS, 9, mix=[(10, 0.3)])):
        assert one.load_state_dict(state) == ""
        assert one.row(12) is ROWS[np.random.default_rng([9, 1]).permutation(10)[2]]


def test_no_rows():
    with pytest.raises(UserError, match="no rows"):
        Cursor([])


def test_further_texts_are_wanted_and_named(write):
    path = write('{"question": "p", "good": "s", "bad": "t"}\n{"question": "p", "good": 3}')
    texts = {"good": "data.chosen_key"}
    with pytest.raises(UserError, match=r":2: 'good' must be text or a list of messages, got 3"):
        data.load(str(path), "question", "", texts=texts)
    texts = {"bad": "data.rejected_key"}
    with pytest.raises(UserError, match=r":2: the row has no 'bad'.*set data.rejected_key"):
        data.load(str(path), "question", "", texts=texts)
    with pytest.raises(UserError, match=r":1: the row has no 'answer'"):
        data.load(str(path), texts={})


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({"kind": "arithmetic"}, []),
        ({"train": "a.jsonl"}, [("a.jsonl", 1.0)]),
        ({"train": "a.jsonl", "dataset": "mine.py:rows"}, [("mine.py:rows", 1.0)]),
        ({"kind": "arithmetic", "mix": (("a.csv", 2.0),)}, [("a.csv", 2.0)]),
        ({"kind": "arithmetic", "train": "a.jsonl"}, "is unused, because data.kind=arithmetic"),
        ({"dataset": "mine.py:rows", "mix": (("a.csv", 1),)}, "are both set"),
        ({}, "data.train is empty"),
    ],
)
def test_sources_are_those_that_the_config_names_and_none_is_left_unread(keys, wanted):
    options = types.SimpleNamespace(
        **{"kind": "jsonl", "train": "", "mix": (), "dataset": "", **keys}
    )
    if isinstance(wanted, str):
        with pytest.raises(UserError, match=wanted):
            data.named_sources(options)
    else:
        assert data.named_sources(options) == wanted
