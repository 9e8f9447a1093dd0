"""Make the report's transcripts.

A model wrote them: the template escapes the text, `visible` names characters that hide or reorder.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlx.cli.text import number, visible
from rlx.observe.rundir import finite

PER_VIEW = 6
MAX_CHARACTERS = 6000  # of one text; the middle of a longer one is left out
VIEWS = (("best", "Best"), ("worst", "Worst"), ("early", "First steps"), ("late", "Last steps"))


def choose(samples: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the transcripts of each view; of equal rewards the latest come first."""
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


def cards(
    samples: Sequence[Mapping[str, Any]], image: Callable[[str], str] = lambda name: ""
) -> dict[str, list[dict[str, Any]]]:
    """Return the cards of each view; `image` returns an image's data URI by its name, or ""."""
    rewards = [r for s in samples if (r := finite(s.get("reward"))) is not None]
    low, high = min(rewards, default=0.0), max(rewards, default=1.0)
    views = choose(samples).items()
    return {view: [card(s, low, high, image) for s in chosen] for view, chosen in views}


def card(
    sample: Mapping[str, Any], low: float, high: float, image: Callable[[str], str]
) -> dict[str, Any]:
    """Return one transcript for the template; `good` is 1 at reward `high` and 0 at `low`."""
    reward = finite(sample.get("reward"))
    versions = trained_versions(sample)
    facts = [f"step {sample['step']:g}"]
    if versions:
        span = "–".join(dict.fromkeys(map(str, (min(versions), max(versions)))))
        facts += [f"{len(versions)} tokens", f"version {span}"]
    if sample.get("turns"):
        facts.append(f"{len(sample['turns'])} turns")
    if sample.get("stop_reason") == "length":
        facts.append("cut at the token limit")
    if sample.get("trajectory_id") is not None:
        facts.append(f"#{sample['trajectory_id']}")
    prompt = sample.get("prompt") or ""
    if prompt and sample.get("answer") is not None:
        prompt = f"{prompt}\n\n(answer: {sample['answer']})"
    return {
        "reward": number(reward), "facts": [visible(fact) for fact in facts],
        "good": 0.5 if reward is None or high <= low else round((reward - low) / (high - low), 3),
        "prompt": _cut(visible(prompt)), "pieces": pieces(sample),
        "images": [*filter(None, map(image, sample.get("images") or ()))],
    }  # fmt: skip


def pieces(sample: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the completion as (text, tooltip) of each turn, and of what is observed between."""
    text, shown, parts = sample["completion"], 0, list[tuple[str, str]]()
    if len(text) > MAX_CHARACTERS:
        return [(_cut(visible(text)), "")]
    for turn, (start, end, _) in enumerate(sample.get("turns") or [[0, len(text), 0]], 1):
        if start > shown:
            parts.append((visible(text[shown:start]), f"before turn {turn}, observed"))
        parts.append((visible(text[start:end]), ""))
        shown = end
    if shown < len(text):
        parts.append((visible(text[shown:]), ""))
    return parts


def trained_versions(sample: Mapping[str, Any]) -> list[int]:
    """Return the versions of the sampled tokens, without those of prompt and tools (−1)."""
    versions = sample.get("versions")
    items = versions if isinstance(versions, list) else []
    return [int(v) for v in items if isinstance(v, int | float) and v >= 0]


def _cut(text: str) -> str:
    if len(text) <= MAX_CHARACTERS:
        return text
    half = MAX_CHARACTERS // 2
    return f"{text[:half]}\n… {len(text) - 2 * half:,} characters left out …\n{text[-half:]}"
