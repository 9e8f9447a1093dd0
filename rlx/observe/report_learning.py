"""Make the report's tiles and charts of rewards, losses, accuracies and the update."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from rlx.cli.text import number
from rlx.observe.charts import Line, line_chart
from rlx.observe.metrics import HELD_OUT, TRAINED, present
from rlx.observe.rundir import Run, finite


class Chart(NamedTuple):
    """A chart whose lines are (metric, name, color); `low` and `high` must be visible."""

    title: str
    about: str
    trained: tuple[tuple[str, str, str], ...]  # of the steps
    held_out: tuple[tuple[str, str, str], ...] = ()  # of the evaluations
    low: float | None = 0
    high: float | None = None


ON_ROLLOUTS = (
    Chart("Reward and held-out accuracy",
          "mean reward of each batch (bold: running mean), greedy accuracy on unseen questions",
          (("task_reward", "task reward", "c1"),), (("greedy_acc", "held-out accuracy", "c2"),),
          low=None),
)  # fmt: skip
ON_DATASET = (
    Chart("Loss", "of each batch (bold: running mean) and of held-out rows (dots)",
          (("sft_loss", "trained", "c1"), ("pair_loss", "trained", "c1")),
          (("held_out_sft_loss", "held out", "c2"), ("held_out_pair_loss", "held out", "c2"))),
    Chart("Accuracy", "share that is right, of pairs or of answers to unseen questions",
          (("pair_accuracy", "trained pairs", "c1"),),
          (("held_out_pair_accuracy", "held-out pairs", "c2"),
           ("greedy_acc", "greedy answers", "c3")),
          low=None, high=1),
    Chart("Margin", "by how much the chosen answer is ahead, on average",
          (("pair_margin", "trained", "c1"),), (("held_out_pair_margin", "held out", "c2"),)),
)  # fmt: skip
OPTIMISATION = (
    Chart("Entropy", "nats a token; falls as the policy commits", (("entropy", "entropy", "c1"),)),
    Chart("Gradient norm", "before clipping", (("grad_norm", "norm", "c4"),)),
    Chart("Policy loss", "the objective being minimised", (("actor_loss", "loss", "c2"),),
          low=None),
    Chart("Off-policy drift", "KL of behaviour and of the update, nats",
          (("behaviour_kl", "behaviour", "c5"), ("ppo_approx_kl", "update", "c6"))),
    Chart("Importance weights", "mean ratio; 1 is on-policy",
          (("behaviour_weight", "behaviour", "c5"), ("importance_weight", "importance", "c6")),
          low=None),
    Chart("Clipped tokens", "share of trained tokens at the clip",
          (("actor_clip_ratio", "clipped", "c2"),)),
    Chart("Trajectory length", "mean tokens, prompts included",
          (("avg_seq_len", "tokens", "c3"),)),
    Chart("Cut completions", "share that hit the token limit", (("no_eos_ratio", "cut", "c5"),)),
    Chart("Chosen and rejected", "their scores, or β·log(π/π_ref)",
          (("pair_chosen", "chosen", "c3"), ("pair_rejected", "rejected", "c8")), low=None),
    Chart("Distance to the anchor", "KL to the reference or the teacher, nats a token",
          (("reference_kl", "KL", "c8"),)),
    Chart("Balance of experts", "E · Σ share · probability of a batch; 1 is even",
          (("expert_balance", "balance", "c4"),), low=1),
    Chart("Busiest expert", "its share of one layer's choices",
          (("expert_max_share", "share", "c2"),)),
    Chart("Router entropy", "before the choice, nats a token and layer",
          (("router_entropy", "entropy", "c6"),)),
    Chart("Learning rate", "after the schedule", (("learning_rate", "rate", "c7"),)),
)  # fmt: skip
_TILES = {  # titles of HELD_OUT
    "greedy_acc": "Held-out accuracy", "held_out_sft_loss": "Held-out loss",
    "held_out_pair_loss": "Held-out loss", "held_out_pair_accuracy": "Held-out pairs right",
    "held_out_pair_margin": "Held-out margin",
}  # fmt: skip


def on_dataset(run: Run) -> bool:
    """Return whether the run trained on a dataset's rows, not on rollouts and their rewards."""
    return next(iter(present(TRAINED, run.metrics)), "task_reward") != "task_reward"


def tiles(run: Run) -> Iterator[tuple[str, str, str, str]]:
    """Yield (color, title, value, note) of held-out metrics and of the reward."""
    for key in present(HELD_OUT, run.evals):
        values = [v for e in run.evals if (v := finite(e.get(key))) is not None]
        if values:
            last = next(finite(e[key]) for e in reversed(run.evals) if key in e)
            yield "c2", _TILES[key], number(last), f"from {number(values[0])}"
    rewards = [v for v in run.series("task_reward") if v is not None]
    if rewards:
        edge = max(1, len(rewards) // 20)
        first, last = (sum(part) / edge for part in (rewards[:edge], rewards[-edge:]))
        yield "c1", "Task reward", number(last), f"from {number(first)}"


def learning(run: Run) -> list[dict[str, Any]]:
    """Return the charts of reward or loss, and of held-out questions."""
    return _charts(run, ON_DATASET if on_dataset(run) else (*ON_ROLLOUTS, *_by_prefix(run)))


def optimisation(run: Run) -> list[dict[str, Any]]:
    """Return the charts of the update: entropy, gradients, ratios, lengths."""
    return _charts(run, (*OPTIMISATION, *_experts(run)))


def _experts(run: Run) -> Iterator[Chart]:
    """Yield a chart of a mixture's experts: all, or the least and the most used ones at the end."""
    loads = (record.get("expert_load") for record in reversed(run.metrics))
    load: dict[str, Any] = next(filter(None, loads), {})
    ranked = sorted(load, key=lambda name: finite(load[name]) or 0.0)
    names = ranked if len(ranked) <= 8 else ranked[:4] + ranked[-4:]  # colors
    if names:
        about = f"share of the choices, mean over layers; {1 / len(load):.3g} is even"
        lines = ((f"expert_load.{name}", name, f"c{i}") for i, name in enumerate(names, 1))
        yield Chart("Load of experts", about, tuple(lines))


def _by_prefix(run: Run) -> Iterator[Chart]:
    """Yield a chart of the rewards where there are several, and one of what a workflow counts."""
    keys = sorted({name for record in run.metrics for name in record})
    for prefix, title, about, least in (
        ("reward/", "Rewards", "mean of each in a batch, before its weight", 2),
        ("info/", "The workflow's own", "means over the batch's samples", 1),
        ("latency/", "Latency of agents", "mean seconds of a run, and of a call that it makes", 1),
    ):
        names = [name for name in keys if name.startswith(prefix)][:8]  # colors
        lines = ((name, name.removeprefix(prefix), f"c{i}") for i, name in enumerate(names, 1))
        if len(names) >= least:
            yield Chart(title, about, tuple(lines), low=None)


def _charts(run: Run, charts: tuple[Chart, ...]) -> list[dict[str, Any]]:
    """Return the charts for which the run has a value."""
    if not run.metrics:
        return []
    steps = [e["step"] for e in run.evals]
    times = [finite(e.get("elapsed_seconds")) for e in run.evals]
    plots = []
    for chart in charts:
        lines = [Line(name, run.series(key), c, smooth=True) for key, name, c in chart.trained]
        for key, name, color in chart.held_out:
            values = [finite(e.get(key)) for e in run.evals]
            lines.append(Line(name, values, color, dots=True, steps=steps, times=times))
        plots.append(line_chart(chart.title, chart.about, lines, run.axes(),
                                low=chart.low, high=chart.high))  # fmt: skip
    return [chart for chart in plots if chart]
