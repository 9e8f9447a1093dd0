"""What a run has learned, for its report: the tiles and charts of rewards, losses, accuracies."""

from collections.abc import Iterator, Sequence

from rlx.cli.text import number
from rlx.observe.charts import Line, grid, line_chart
from rlx.observe.key_metrics import HELD_OUT, TRAINED, present
from rlx.observe.rundir import Run, finite

_WIDE, _HALF = (1096, 320), (532, 220)
# What a run on a dataset has learned: title, what it says, (metric, name, color) of batches and of
# evaluations, least and greatest y that must show.
_ON_DATASET = (
    ("Loss", "of each batch (bold: running mean) and of held-out rows (dots)",
     (("sft_loss", "trained", "c1"), ("pair_loss", "trained", "c1")),
     (("held_out_sft_loss", "held out", "c2"), ("held_out_pair_loss", "held out", "c2")),
     (0, None)),
    ("Accuracy", "share that is right, of pairs or of answers to unseen questions",
     (("pair_accuracy", "trained pairs", "c1"),),
     (("held_out_pair_accuracy", "held-out pairs", "c2"), ("greedy_acc", "greedy answers", "c3")),
     (None, 1)),
    ("Margin", "by how much the chosen answer is ahead, on average",
     (("pair_margin", "trained", "c1"),), (("held_out_pair_margin", "held out", "c2"),), (0, None)),
)  # fmt: skip
_TILES = {  # titles of what evaluations say
    "greedy_acc": "Held-out accuracy",
    "held_out_sft_loss": "Held-out loss",
    "held_out_pair_loss": "Held-out loss",
    "held_out_pair_accuracy": "Held-out pairs right",
    "held_out_pair_margin": "Held-out margin",
}


def on_dataset(run: Run) -> bool:
    """Whether it was trained on what a dataset says, not on rollouts and their rewards."""
    found = present(TRAINED, run.metrics)
    return bool(found) and found[0].key != "task_reward"


def tiles(run: Run) -> Iterator[tuple[str, str, str, str]]:
    """(color, title, value, note) of what the run is judged by."""
    for key in (metric.key for metric in present(HELD_OUT, run.evals)):
        values = [v for e in run.evals if (v := finite(e.get(key))) is not None]
        if values:
            yield "c2", _TILES[key], number(values[-1]), f"from {number(values[0])}"
    rewards = [v for v in run.series("task_reward") if v is not None]
    if rewards:
        edge = max(1, len(rewards) // 20)
        first, last = (sum(part) / edge for part in (rewards[:edge], rewards[-edge:]))
        yield "c1", "Task reward", number(last), f"from {number(first)}"


def charts(run: Run) -> str:
    """Curves over the steps; a sentence before the first of them."""
    if not run.metrics:
        return "<p>No step is finished yet.</p>"
    if on_dataset(run):
        return grid("two", [_dataset_chart(run, *row) for row in _ON_DATASET])
    accuracy = _evaluated(run, "greedy_acc", "held-out accuracy", "c2")
    reward = Line("task reward", run.series("task_reward"), "c1", smooth=True)
    chart = line_chart(
        "Reward and held-out accuracy",
        "mean reward of each batch (bold: running mean), greedy accuracy on unseen questions",
        [reward, accuracy], *run.axes(), size=_WIDE,
    )  # fmt: skip
    return f'<div class="wide">{chart}</div>' if chart else "<p>No step is finished yet.</p>"


def _dataset_chart(
    run: Run,
    title: str,
    about: str,
    trained: Sequence[tuple[str, str, str]],
    held_out: Sequence[tuple[str, str, str]],
    span: tuple[float | None, float | None],
) -> str:
    """One row of _ON_DATASET; empty where the run has none of it."""
    lines = [Line(name, run.series(key), color, smooth=True) for key, name, color in trained]
    lines += [_evaluated(run, *row) for row in held_out]
    return line_chart(title, about, lines, *run.axes(), size=_HALF, span=span)


def _evaluated(run: Run, key: str, name: str, color: str) -> Line:
    """A line through the evaluations."""
    return Line(
        name, [finite(e.get(key)) for e in run.evals], color, dots=True,
        steps=[e["step"] for e in run.evals],
        times=[finite(e.get("elapsed_seconds")) for e in run.evals],
    )  # fmt: skip
