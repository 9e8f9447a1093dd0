"""Compute pass@k, maj@k, confidence intervals and the rows of an evaluation's table."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np

from rlx.base import UserError
from rlx.cli.text import aligned
from rlx.rewards import numbers
from rlx.rewards.answers import compact, final_answers, outside_thoughts, tidy

RIGHT = 0.5  # a reward above it counts as a right answer


def pass_at_k(n: int, right: int, k: int) -> float:
    """Return the chance that k of n samples hold a right one: 1 − C(n − c, k) / C(n, k).

    Unbiased (Chen et al., arXiv:2107.03374, eq. 1). `right` is c; ValueError unless 1 ≤ k ≤ n.
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {n} samples; want 1 ≤ k ≤ n")
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def maj_at_k(answers: Sequence[str | None], right: Sequence[bool], k: int) -> float:
    """Return the share of blocks of k samples whose commonest answer is right, in [0, 1].

    A tie goes to the answer that came first; None has no vote, and a block of None is wrong.
    Samples left over do not vote. ValueError unless 1 ≤ k ≤ samples.
    """
    if not 1 <= k <= len(answers):
        raise ValueError(f"maj@{k} of {len(answers)} samples; want 1 ≤ k ≤ samples")
    won, blocks = 0, len(answers) // k
    for start in range(0, blocks * k, k):
        votes = Counter(a for a in answers[start : start + k] if a is not None)
        for winner, _ in votes.most_common(1):
            won += right[start + answers[start : start + k].index(winner)]
    return won / blocks


def ballot(completion: str) -> str | None:
    """Return a completion's answer as text to vote with, the same for equal numbers; or None."""
    answers = final_answers(outside_thoughts("", completion))
    for reading in map(tidy, answers):  # the first that is a number counts, else the first
        if number := numbers.read(reading):
            return f"{number.value}{'%' if number.percent else ''}"
    return compact(tidy(answers[0])) or None if answers else None


def interval(values: Sequence[float], share: bool = True) -> tuple[float, float] | None:
    """Return a mean's 95 % confidence interval, (low, high); None for fewer than two questions.

    For shares, in [0, 1], it is Wilson's score interval (10.2307/2276774), for others Student's.
    """
    if (n := len(values)) < 2:
        return None
    x = np.asarray(values, np.float64)
    mean, variance, z = float(x.mean()), float(x.var()), NormalDist().inv_cdf(0.975)
    if not share:
        t = z + (z**3 + z) / (4 * n - 4) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * (n - 1) ** 2)
        half = t * math.sqrt(variance / (n - 1))  # t: Abramowitz and Stegun 26.7.5
        return mean - half, mean + half
    # A share of several samples varies less than 0 and 1, so its question counts for more. The
    # limit is two, because a few questions do not show the spread of others.
    spread = mean * (1 - mean)
    size = n * min(spread / variance, 2.0) if variance else n * (2.0 if spread else 1.0)
    centre = (mean + z * z / (2 * size)) / (1 + z * z / size)
    half = z / (1 + z * z / size) * math.sqrt(spread / size + (z / (2 * size)) ** 2)
    return max(centre - half, 0.0), min(centre + half, 1.0)


def per_question(
    greedy: Mapping[str, Any] | None, samples: Sequence[Mapping[str, Any]],
    pass_at: Sequence[int], maj_at: Sequence[int],
) -> dict[str, float]:  # fmt: skip
    """Return the table's quantities for one question, by its records (the one at temperature 0).

    A record has reward, tokens and answer. One with an `error` is wrong and has no length.
    """
    out = {}
    if greedy is not None:
        if "error" not in greedy:
            out["greedy_length"] = float(greedy["tokens"])
        out["greedy_acc"] = float(greedy["reward"] > RIGHT)
    if samples:
        right = [bool(s["reward"] > RIGHT) for s in samples]
        if lengths := [s["tokens"] for s in samples if "error" not in s]:
            out["sample_length"] = float(np.mean(lengths))
        out["sample_pass@1"] = pass_at_k(len(right), sum(right), 1)
        out |= {f"pass@{k}": pass_at_k(len(right), sum(right), k) for k in pass_at}
        answers = [s["answer"] for s in samples]
        out |= {f"maj@{k}": maj_at_k(answers, right, k) for k in maj_at}
    return out


def row(dataset: str, questions: Sequence[Mapping], names: Sequence[str]) -> dict[str, object]:
    """Return one row of the table: means over questions, with their intervals of 95 %."""
    cells: dict[str, object] = {"dataset": dataset, "num_questions": len(questions)}
    intervals = {}
    for name in names:
        values = [q[name] for q in questions if name in q]
        cells[name] = float(np.mean(values)) if values else None
        intervals[name] = interval(values, share=not name.endswith("length"))
    return {**cells, "intervals": intervals}


def text_table(rows: Sequence[Mapping[str, object]], names: Sequence[str]) -> str:
    """Return the rows as aligned text, those of several models grouped by data set."""
    several = len({row.get("model") for row in rows}) > 1
    lead = ("model", "dataset") if several else ("dataset",)
    sets = list(dict.fromkeys(row["dataset"] for row in rows))
    lines = [[*lead, "num_questions", *names]]
    for table_row in sorted(rows, key=lambda row: sets.index(row["dataset"])):
        cells = [*(str(table_row[name]) for name in lead), str(table_row["num_questions"])]
        for name in names:
            value, digits = table_row[name], 1 if name.endswith("length") else 3
            cells.append("-" if value is None else f"{value:.{digits}f}")
        lines.append(cells)
    return "\n".join(aligned(lines, len(lead)))


def check_samples(n: int, pass_at: Sequence[int], maj_at: Sequence[int]) -> None:
    """Raise UserError for a k that n samples cannot give."""
    for name, ks in (("pass", pass_at), ("maj", maj_at)):
        for k in ks:
            if not 1 <= k <= n:
                problem = f"{name}@{k} needs {max(k, 1)} samples a question and n_samples={n}"
                raise UserError(f"{problem}; raise --n_samples or lower --{name}_at")
