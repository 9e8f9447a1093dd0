"""Transcripts as HTML: what the model wrote, each token shaded by the lag of its version.

Everything here comes from a model: it is escaped, and characters that would hide or
reorder text are shown by name.
"""

from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from typing import Any

from rlx.cli.text import number, visible
from rlx.observe.rundir import finite

PER_VIEW = 6
MAX_CHARACTERS = 6000  # of one text; the middle of a longer one is left out
VIEWS = (("best", "Best"), ("worst", "Worst"), ("early", "First steps"), ("late", "Last steps"))


def choose(samples: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The transcripts of each view: highest and lowest rewards (latest first), both ends."""
    unique = list({(s.get("prompt"), s["completion"]): s for s in samples}.values())
    rated = [s for s in unique if finite(s.get("reward")) is not None]
    by_step = sorted(unique, key=lambda s: s["step"])
    half = min(PER_VIEW, (len(rated) + 1) // 2)  # so that no transcript is best and worst
    return {
        "best": sorted(rated, key=lambda s: (-s["reward"], -s["step"]))[:half],
        "worst": sorted(rated, key=lambda s: (s["reward"], -s["step"]))[:half],
        "early": by_step[:PER_VIEW],
        "late": by_step[::-1][:PER_VIEW],
    }


def cards(samples: Sequence[Mapping[str, Any]]) -> str:
    """All views, one card a transcript; the page shows one view at a time."""
    rewards = [r for s in samples if (r := finite(s.get("reward"))) is not None]
    low, high = min(rewards, default=0.0), max(rewards, default=1.0)
    return "".join(
        f'<div class="cards view view-{name}">{"".join(card(s, low, high) for s in chosen)}</div>'
        for name, chosen in choose(samples).items()
    )


def card(sample: Mapping[str, Any], low: float, high: float) -> str:
    """One transcript; the badge is green at reward `high` and red at `low`."""
    reward = finite(sample.get("reward"))
    share = 0.5 if reward is None or high <= low else (reward - low) / (high - low)
    versions = trained_versions(sample)
    facts = [f"step {sample['step']:g}"]
    if versions:
        facts.append(f"{len(versions)} tokens")
        oldest, newest = min(versions), max(versions)
        facts.append(f"version {oldest}" + (f"–{newest}" if newest > oldest else ""))
    if finite(sample.get("advantage")) is not None:
        facts.append(f"advantage {number(sample['advantage'])}")
    if sample.get("stop_reason") == "length":
        facts.append("cut at the token limit")
    if sample.get("trajectory_id") is not None:
        facts.append(f"#{sample['trajectory_id']}")
    about = "".join(f"<li>{escape(visible(fact))}</li>" for fact in facts)
    prompt = sample.get("prompt")
    answer = sample.get("answer")
    if isinstance(prompt, str) and prompt and answer is not None:
        prompt = f"{prompt}\n\n(answer: {answer})"
    asked = (
        f'<details class="prompt"><summary>Prompt</summary><pre>{escape(_cut(visible(prompt)))}'
        "</pre></details>"
        if isinstance(prompt, str) and prompt
        else ""
    )
    return (
        f'<article class="card sample"><header><b class="reward" style="--good:{share:.3f}">'
        f"{number(reward)}</b><ul>{about}</ul></header>{asked}"
        f'<pre class="completion">{shaded(sample, versions)}</pre></article>'
    )


def shaded(sample: Mapping[str, Any], versions: Sequence[int]) -> str:
    """The completion as spans of one version each, classed by lag behind the trainer.

    The trainer consumed step k with version k − 1. Without the tokens' texts (`token_texts`,
    or `tokens` as strings) the text is divided evenly over the tokens.
    """
    text = sample["completion"]
    if not versions or len(text) > MAX_CHARACTERS:
        return escape(_cut(visible(text)))
    current = int(sample["step"]) - 1
    parts = []
    runs = groupby(zip(_pieces(sample, len(versions)), versions, strict=True), key=lambda p: p[1])
    for version, run in runs:
        pieces = [piece for piece, _ in run]
        lag = max(0, current - version)
        tip = f"version {version}, lag {lag}\n{len(pieces)} tokens"
        parts.append(
            f'<span class="lag lag{min(lag, 5)}" data-tip="{escape(tip)}">'
            f"{escape(visible(''.join(pieces)))}</span>"
        )
    return "".join(parts)


def trained_versions(sample: Mapping[str, Any]) -> list[int]:
    """The versions of the sampled tokens; prompt and tool tokens (−1) are left out."""
    versions = sample.get("versions")
    if not isinstance(versions, list):
        return []
    return [int(v) for v in versions if isinstance(v, int | float) and v >= 0]


def _pieces(sample: Mapping[str, Any], count: int) -> list[str]:
    """The completion cut into `count` texts, at its tokens when they are known."""
    text = sample["completion"]
    for key in ("token_texts", "tokens"):
        tokens = sample.get(key)
        if not isinstance(tokens, list) or len(tokens) != count:
            continue
        if all(isinstance(t, str) for t in tokens) and "".join(tokens).startswith(text):
            return tokens
    edges = [round(i * len(text) / count) for i in range(count + 1)]
    return [text[edges[i] : edges[i + 1]] for i in range(count)]


def _cut(text: str) -> str:
    if len(text) <= MAX_CHARACTERS:
        return text
    half = MAX_CHARACTERS // 2
    return f"{text[:half]}\n… {len(text) - 2 * half:,} characters left out …\n{text[-half:]}"
