"""Draw held-out pictures with their questions and a policy's answers.

python -m experiments.2026-12-shapes.figure SAMPLES    # of rlx.evaluate; writes answers.png
"""

import base64
import io
import sys
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from PIL import Image

from rlx.rollout import shapes
from rlx.system.jsonl import read_jsonl

HERE = Path(__file__).parent
COLUMNS, ROWS = 6, 2


def main(samples: str) -> None:
    """Draw two pictures of each kind with an even index, and a wrong answer in each row."""
    answers = {record["index"]: record for record in read_jsonl(Path(samples))}
    rows = shapes.problems(0, "held_out", len(answers))
    wrong = [i for i, record in answers.items() if not record["reward"]][:ROWS]
    right = [i for i in answers if answers[i]["reward"]]
    kinds = [[i for i in right if rows[i]["kind"] == kind] for kind in shapes.KINDS]
    per_row = [[k[row] for k in kinds] + [kinds[row][2], wrong[row]] for row in range(ROWS)]
    figure, axes = plt.subplots(ROWS, COLUMNS, figsize=(12, 5.2))
    for axis, index in zip(axes.flat, [i for row in per_row for i in row], strict=True):
        picture, text = rows[index]["question"][0]["content"]
        data = base64.b64decode(picture["image"].partition(",")[2])
        axis.imshow(Image.open(io.BytesIO(data)))
        axis.set_title(text["text"], fontsize=9)
        said = answers[index]["completion"].removesuffix("<|im_end|>").strip()
        good = said == rows[index]["answer"]
        shown = said if good else f"{said}  (right: {rows[index]['answer']})"
        axis.set_xlabel(shown, fontsize=10, color="tab:green" if good else "tab:red")
        axis.set_xticks([])
        axis.set_yticks([])
    figure.tight_layout()
    figure.savefig(HERE / "answers.png", dpi=100)


if __name__ == "__main__":
    main(sys.argv[1])
