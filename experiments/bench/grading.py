"""Compare grading time per 1,000 answers with math-verify called directly, by kind of answer.

    python -m experiments.bench.grading [GSM8K.jsonl] [--count=100] [--repeats=5] [--worst]

Each kind is graded --repeats times by rlx, and by `math_verify.parse` and `verify` with their
defaults, in alternation. Times are processor time of this process, without the first answers, which
build tables. The table also counts the answers that get their intended reward. GSM8K's answers are
the file's own solutions, or generated ones. `--worst` times answers made to take long, once each.
"""

import argparse
import json
import logging
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import math_verify

from rlx.rewards import rewards, symbolic

Case = tuple[str, str, float]  # a row's answer, a completion, the reward it deserves
DEFAULT = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "gsm8k" / "test.jsonl"
WORDS = "Each of the boxes holds some pens so we add them up and then take away what was sold . "
LEAST = 0.3  # least seconds of a measurement; the clock ticks in hundredths
WORST = {
    "tower 9^9^9": r"9^{9^{9}}",
    "factorial": "100000000!",
    "power": "9^{99999999}+x",
    "expansion": r"(x+y+z+1)^{200}(x-y)^{200}",
    "absolute values": "|" * 30 + "x" + "|" * 30,
    "brackets": "[" * 11 + "1" + "]" * 11,
    "functions": r"\sin(\cos(\tan(x^{17}+y^{13})))^{40}+\cos(x)^{40}",
    "integral": r"\int_0^{1} e^{x^2} \sin(x) dx",
    "subscripts": "x_" * 100 + "x",
    "100 kB of digits": "9" * 100_000,
    "100 kB of brackets": r"\frac{1}{" * 11_000,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="?", type=Path, default=DEFAULT if DEFAULT.exists() else None)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--worst", action="store_true")
    flags = parser.parse_args()
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    symbolic.warm()
    direct(r"\sqrt{12}", r"\boxed{2\sqrt{3}}")
    if flags.worst:
        worst()
        return
    print(f"GSM8K's answers from {flags.rows or 'a generator'}")
    print(f"{'s per 1,000 answers':24}{'rlx':>26}{'math-verify':>22}{'right':>9}{'right':>7}")
    for kind, cases in kinds(flags.rows, flags.count).items():
        ours, theirs = grade_as(kind), direct
        times: dict[Callable[[str, str], float], list[float]] = {ours: [], theirs: []}
        for _ in range(flags.repeats):
            for grader, found in times.items():
                found.append(seconds(grader, cases) * 1000)
        right = [sum(g(a, c) == r for a, c, r in cases) / len(cases) for g in (ours, theirs)]
        print(
            f"{kind:24}{spread(times[ours]):>26}{spread(times[theirs]):>22}"
            f"{right[0]:9.0%}{right[1]:7.0%}"
        )


def grade_as(kind: str) -> Callable[[str, str], float]:
    """Return rlx's grade for this kind of answer, called with math-verify's arguments."""
    function = rewards.gsm8k if kind.startswith("gsm8k") else rewards.math
    return lambda answer, completion: function("", completion, [], [], answer=answer)


def direct(answer: str, completion: str) -> float:
    """Return math-verify's grade, called as in its documentation."""
    gold = answer.rpartition("#### ")[2]
    wanted = math_verify.parse(f"\\boxed{{{gold}}}")
    return float(math_verify.verify(wanted, math_verify.parse(completion)))


def seconds(grader: Callable[[str, str], float], cases: Sequence[Case]) -> float:
    """Return the processor time of one case, from as many passes as take LEAST seconds."""
    passes, started = 0, time.process_time()
    while not passes or time.process_time() - started < LEAST:
        symbolic.parsed.cache_clear()
        for answer, completion, _ in cases:
            grader(answer, completion)
        passes += 1
    return (time.process_time() - started) / passes / len(cases)


def spread(values: Sequence[float]) -> str:
    """Return median and range."""
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def kinds(path: Path | None, count: int) -> dict[str, list[Case]]:
    """Return answers of each kind; every other one is wrong."""
    draw = random.Random(0)
    solutions = gsm8k(path, count, draw)
    cases: dict[str, list[Case]] = {"gsm8k ####": [], "gsm8k, as math": []}
    for index, solution in enumerate(solutions):
        wrong = index % 2
        given = solution + "1" * wrong
        cases["gsm8k ####"].append((solution, given, 1.0 - wrong))
        number = solution.rpartition("#### ")[2] + "1" * wrong
        text = solution.rpartition("#### ")[0] + f"The answer is $\\boxed{{{number}}}$."
        cases["gsm8k, as math"].append((solution, text, 1.0 - wrong))
    for kind, make in MAKERS.items():
        cases[kind] = []
        for index in range(count):
            a, b, c = draw.randint(2, 60), draw.randint(2, 60), draw.randint(2, 9)
            answer, same, other = make(a, b + a, c)
            got, reward = (same, 1.0) if index % 2 == 0 else (other, 0.0)
            cases[kind].append((answer, f"{WORDS * 5} So \\boxed{{{got}}}.", reward))
    return cases


MAKERS: dict[str, Callable[[int, int, int], tuple[str, str, str]]] = {
    "fractions": lambda a, b, c: (
        rf"\frac{{{a}}}{{{b}}}", rf"\dfrac{{{a * c}}}{{{b * c}}}", rf"\frac{{{a + 1}}}{{{b}}}"),
    "percentages": lambda a, b, c: (f"0.{a:02}", rf"{a}\%", rf"{a + 1}\%"),
    "units": lambda a, b, c: (f"{a}", rf"{a} \text{{ cm}}^2", rf"{b} \text{{ cm}}^2"),
    "variables for units": lambda a, b, c: (f"{a}", f"x = {a}", f"{a}t"),
    "intervals": lambda a, b, c: (f"({a},{b}]", rf"\left({a}, {b}\right]", f"[{a},{b}]"),
    "tuples": lambda a, b, c: (f"({a},{b},{c})", rf"({a}, {b}, {c})", f"({b},{a},{c})"),
    "sets": lambda a, b, c: (rf"\{{{a},{b}\}}", rf"\{{{b}, {a}\}}", rf"\{{{a},{b + 1}\}}"),
    "words": lambda a, b, c: (r"\text{Tuesday}", "tuesday", r"\text{Monday}"),
    "choices": lambda a, b, c: ("B", r"\text{(B)}", r"\text{(C)}"),
    "roots": lambda a, b, c: (
        rf"{c}\sqrt{{{b}}}", rf"\sqrt{{{c * c * b}}}", rf"\sqrt{{{c * c * b + 1}}}"),
    "polynomials": lambda a, b, c: (
        f"(x+{a})(x+{b})", f"x^2+{a + b}x+{a * b}", f"x^2+{a + b}x+{a * b + 1}"),
    "inequalities": lambda a, b, c: (rf"({a},\infty)", f"x > {a}", f"x > {b}"),
}  # fmt: skip


def gsm8k(path: Path | None, count: int, draw: random.Random) -> list[str]:
    """Yield solutions that end in `#### 72`."""
    if path:
        lines = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
        return [json.loads(line)["answer"] for line in draw.sample(lines, min(count, len(lines)))]
    return [
        f"{WORDS * 4}\nThat is {a} + {b} = <<{a}+{b}={a + b}>>{a + b}.\n#### {a + b}"
        for a, b in ((draw.randint(1, 999), draw.randint(1, 999)) for _ in range(count))
    ]


def worst() -> None:
    """Return one slow answer of each sort, which should soon be graded 0."""
    print(f"{'CPU s for one answer':24}{'rlx':>10}{'math-verify':>14}")
    for name, text in WORST.items():
        row = []
        for grader in (grade_as("math"), direct):
            started = time.process_time()
            grader("85", f"\\boxed{{{text}}}")
            row.append(time.process_time() - started)
        print(f"{name:24}{row[0]:10.3f}{row[1]:14.3f}")


if __name__ == "__main__":
    main()
