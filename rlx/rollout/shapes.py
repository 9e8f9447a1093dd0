"""Make the problems of the second embedded task: small pictures, with questions about them.

A picture has 2 × 2 cells of 16 pixels, and in 1 to 4 of these a circle, square or triangle of one
of four colours. Size and place in the cell vary. Questions are `how many red circles?`, `what
colour is the circle?`, `what shape is red?` and `where is the red circle?`. Answers are `2`,
`blue`, `square` and `top left`.

A hash of what stands in the cells assigns a picture, with all of its questions, to training or to
the held-out set. It does not depend on the seed.
"""

import base64
import io
import itertools
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from rlx.base import packages_of
from rlx.rollout import arithmetic

COLOURS = {
    "red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220), "yellow": (240, 210, 40),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle")
PLACES = ("top left", "top right", "bottom left", "bottom right")
KINDS = {  # → answers
    "count": tuple("01234"), "colour": tuple(COLOURS), "shape": SHAPES, "place": PLACES,
}  # fmt: skip
CELL, SMALLEST, LARGEST = 16, 11, 13  # pixels: of a cell, of a shape
BACKGROUND = (128, 128, 128)  # 0 for a model, which is easier to learn from than white
_PNG = "data:image/png;base64,"


class Figure(NamedTuple):
    """A shape in a cell, which is an index of PLACES."""

    cell: int
    colour: str
    shape: str


Scene = tuple[Figure, ...]


def problems(seed: int, split: str, n: int) -> list[dict[str, Any]]:
    """Return the first `n` rows of `stream`."""
    return list(itertools.islice(stream(seed, split), n))


def stream(seed: int, split: str) -> Iterator[dict[str, Any]]:
    """Yield rows without end: `question`, a chat message with a picture, `answer` and `kind`.

    A picture has a row for each kind that it allows. UserError for another split than train and
    held_out, or without Pillow.
    """
    for entry in arithmetic.distinct("shapes", seed, split, lambda rng, _: _draw(rng, split)):
        yield from entry["rows"]


def questions(scene: Scene) -> dict[str, dict[str, list[str]]]:
    """Return the questions that a scene answers, by kind and answer."""
    table: dict[str, dict[str, list[str]]] = {kind: {} for kind in KINDS}
    for colour, shape in itertools.product((*COLOURS, ""), (*SHAPES, "")):
        same = [s for s in scene if colour in (s.colour, "") and shape in (s.shape, "")]
        thing, unique = f"{colour} {shape or 'shape'}".strip(), len(same) == 1
        if colour or shape:
            table["count"].setdefault(str(len(same)), []).append(f"how many {thing}s?")
        if unique and shape and not colour:
            table["colour"].setdefault(same[0].colour, []).append(f"what colour is the {thing}?")
        if unique and colour and not shape:
            table["shape"].setdefault(same[0].shape, []).append(f"what shape is {colour}?")
        if unique and shape and colour:
            table["place"].setdefault(PLACES[same[0].cell], []).append(f"where is the {thing}?")
    return table


def wrong_answer(row: dict[str, Any]) -> str:
    """Return another answer than the row's, of its kind; always the same for a row."""
    rng = random.Random(f"wrong {row['question']}")
    return rng.choice([answer for answer in KINDS[row["kind"]] if answer != row["answer"]])


def picture(scene: Scene, rng: random.Random) -> bytes:
    """Return a PNG file of a scene; UserError without Pillow."""
    with packages_of("vision", "data.kind=shapes needs Pillow"):
        from PIL import Image, ImageDraw
    image = Image.new("RGB", (2 * CELL, 2 * CELL), BACKGROUND)
    draw = ImageDraw.Draw(image)
    for cell, colour, shape in scene:
        size = rng.randint(SMALLEST, LARGEST)
        left, top = (at * CELL + rng.randint(1, CELL - 1 - size) for at in (cell % 2, cell // 2))
        right, bottom = left + size - 1, top + size - 1
        if shape == "circle":
            draw.ellipse((left, top, right, bottom), fill=COLOURS[colour])
        elif shape == "square":
            draw.rectangle((left, top, right, bottom), fill=COLOURS[colour])
        else:
            corners = [((left + right) // 2, top), (left, bottom), (right, bottom)]
            draw.polygon(corners, fill=COLOURS[colour])
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def _draw(rng: random.Random, split: str) -> dict[str, Any] | None:
    """Return the rows of one picture; None if it belongs to the other split."""
    cells = sorted(rng.sample(range(len(PLACES)), rng.randint(1, len(PLACES))))
    scene = tuple(Figure(cell, rng.choice([*COLOURS]), rng.choice(SHAPES)) for cell in cells)
    if arithmetic.split_of(str(scene)) != split:
        return None
    image, rows = _PNG + base64.b64encode(picture(scene, rng)).decode(), []
    for kind, by_answer in questions(scene).items():
        if by_answer:  # answers of a kind are about equally frequent
            answer = rng.choice([*by_answer])
            parts = [
                {"type": "image", "image": image},
                {"type": "text", "text": rng.choice(by_answer[answer])},
            ]
            question = [{"role": "user", "content": parts}]
            rows.append({"question": question, "answer": answer, "kind": kind})
    return {"question": image, "rows": rows}
