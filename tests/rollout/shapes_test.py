"""Problems about pictures: reproducible, split by what is seen, answered rightly."""

import base64
import io
import itertools

import numpy as np
import pytest

from rlx.base import UserError
from rlx.model import shapes_model
from rlx.rollout import shapes

pillow = pytest.importorskip("PIL.Image")


def _pixels(row):
    part, _ = row["question"][0]["content"]
    data = base64.b64decode(part["image"].removeprefix("data:image/png;base64,"))
    picture = pillow.open(io.BytesIO(data))
    assert picture.format == "PNG"
    assert picture.size == (32, 32)
    return np.asarray(picture.convert("RGB")).astype(int)


def _text(row):
    return row["question"][0]["content"][1]["text"]


def _seen(pixels):
    """Return place, colour and shape of each thing in a picture, by its pixels alone."""
    found = []
    for (y, x), place in zip(itertools.product((0, 16), (0, 16)), shapes.PLACES, strict=True):
        cell = pixels[y : y + 16, x : x + 16]
        filled = (cell != shapes.BACKGROUND).any(-1)
        if not filled.any():
            continue
        (colour,) = {tuple(rgb) for rgb in cell[filled]}
        rows, columns = np.flatnonzero(filled.any(1)), np.flatnonzero(filled.any(0))
        box = filled[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        widths = box.sum(1)
        wide = widths[-1] == box.shape[1]  # a circle is narrow at its lower end
        shape = "square" if box.all() else "triangle" if wide else "circle"
        found.append((place, {v: k for k, v in shapes.COLOURS.items()}[colour], shape))
    return found


def _expected(text, seen):
    words = text.rstrip("?").split()
    colours = [w for w in words if w in shapes.COLOURS]
    kinds = [w.rstrip("s") for w in words if w.rstrip("s") in shapes.SHAPES]
    same = [s for s in seen if (not colours or s[1] in colours) and (not kinds or s[2] in kinds)]
    if text.startswith("how many"):
        return str(len(same))
    ((place, colour, shape),) = same
    asked = {"what colour": colour, "what shape": shape, "where is": place}
    return next(answer for begins, answer in asked.items() if text.startswith(begins))


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_answers_are_what_the_pixels_show(split):
    rows = shapes.problems(3, split, 2000)
    for row in rows:
        assert row["answer"] == _expected(_text(row), _seen(_pixels(row))), _text(row)
    assert {(r["kind"], r["answer"]) for r in rows} == {
        (kind, answer) for kind, answers in shapes.KINDS.items() for answer in answers
    }


def test_a_seed_gives_the_same_rows_and_another_others():
    rows = shapes.problems(0, "train", 50)
    assert shapes.problems(0, "train", 50) == rows
    assert shapes.problems(0, "train", 80)[:50] == rows
    assert shapes.problems(1, "train", 50) != rows


def test_no_held_out_scene_is_trained_on_whatever_the_seed():
    train = {tuple(_seen(_pixels(r))) for r in shapes.problems(0, "train", 3000)}
    held_out = {tuple(_seen(_pixels(r))) for r in shapes.problems(1, "held_out", 600)}
    assert len(train) > 500
    assert len(held_out) > 100
    assert not train & held_out
    with pytest.raises(UserError, match=r"test.*train"):
        next(shapes.stream(0, "test"))


def test_no_answer_to_a_kind_is_much_more_frequent_than_the_others():
    rows = shapes.problems(0, "train", 3000)
    for kind in shapes.KINDS:
        answers = [r["answer"] for r in rows if r["kind"] == kind]
        assert max(map(answers.count, shapes.KINDS[kind])) < 0.45 * len(answers)


def test_a_wrong_answer_is_another_of_its_kind():
    for row in shapes.problems(0, "train", 100):
        wrong = shapes.wrong_answer(row)
        assert wrong != row["answer"]
        assert wrong in shapes.KINDS[row["kind"]]
        assert wrong == shapes.wrong_answer(row)


def test_the_packaged_model_knows_every_word():
    words = {
        word
        for row in shapes.problems(0, "train", 2000)
        for word in (_text(row).replace("?", " ?") + " " + row["answer"]).split()
    }
    assert words <= set(shapes_model._WORDS.split())


@pytest.mark.torch
def test_the_packaged_model_is_made_once_and_answers_nothing_yet(tmp_path, monkeypatch):
    from rlx.model import directory

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = directory.resolve("rlx:shapes")
    before = (made / "model.safetensors").stat().st_mtime_ns
    assert directory.resolve("rlx:shapes") == made
    assert (made / "model.safetensors").stat().st_mtime_ns == before
    config = directory.load_config(made)
    assert config.foreign
    assert config.head_dim == 32
    assert config.eos_token_ids == (1,)
