"""Write docs/algorithms.md from the table of presets: python docs/algorithms.py

The prose is in algorithms.template.md, rows and fields are in rlx/algorithms. An equation is the
indented block in the docstring of its function, found through the code's own tables. A function
without an equation is an error. tests/algorithms/docs_test.py checks the committed page.
"""

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Callable
from pathlib import Path

from rlx.algorithms import advantages, kl, losses, supervised, surrogates
from rlx.algorithms.algorithm import CHOICES, FIELDS, REDUCTIONS, Algorithm, check_choices, choose
from rlx.algorithms.presets import PRESETS, idle, resolve
from rlx.base import UserError

PAGE = Path(__file__).with_suffix(".md")
# As in a run: without the decoupled weight the proximal policy is another one.
ROWS = [dataclasses.replace(a, proximal=resolve({"preset": a.name}, 1).proximal)
        for a in PRESETS.values()]  # fmt: skip
LOSSES = {**surrogates.SURROGATES, **supervised.PAIR_LOSSES, "nll": supervised.nll_loss}
# Fields whose function has a line for each choice, or an equation, in its docstring.
BY_CHOICE = {"peers": advantages.peers, "kl_estimator": kl.estimate,
             "proximal": losses.proximal_logprobs, "weight_action": surrogates.control_weights,
             "reduction": losses.loss_weights, "divergence": surrogates.divergence}  # fmt: skip
BY_FIELD = {
    "critic": losses.value_loss,
    "second_moment": losses.within_second_moment,
    "second_moment_clip": losses.second_moment_bound,
}
STEPS = (advantages.shape_rewards, advantages.standardise, advantages.kl_penalty, advantages.gae,
         losses.policy_loss, kl.estimate, surrogates.kept_sequences)  # fmt: skip


def equation(function: Callable, choice: str = "") -> str:
    """Return the indented block of a function's docstring, or its line for one choice."""
    text = re.split(r"^(?:Args|Returns|Raises):$", inspect.getdoc(function) or "", flags=re.M)[0]
    block = "\n".join(line[4:] for line in text.splitlines() if line.startswith("    "))
    if choice:
        found = re.search(rf"^{choice} +(.*(?:\n +.*)*)", block, re.M)
        block = " ".join(found[1].split()) if found else ""
    if not block:
        raise UserError(f"the docstring of {function.__name__} has no equation {choice}")
    return block


def meaning(a: Algorithm, field: str) -> str:
    """Return the equation of a field's value, or the field's help if there is none."""
    if field in BY_CHOICE:
        words = equation(BY_CHOICE[field], getattr(a, field))
        by_pair = a.data == "pairs" and field == "reduction"
        return f"`{words.rpartition(' / ')[0]} / pairs`" if by_pair else f"`{words}`"
    own = {**BY_FIELD, "loss": choose("loss", a.loss, LOSSES),
           "advantage": choose("advantage", a.advantage, advantages.ADVANTAGES)}  # fmt: skip
    return f"`{equation(own[field])}`" if field in own else FIELDS[field].metadata["doc"]


def written(value: object) -> str:
    """Return a field's value in a table's form."""
    return f"{value:g}".replace("inf", "∞") if isinstance(value, float) else str(value)


def settings(a: Algorithm) -> dict[str, str]:
    """Return the fields that act in a preset and have an equation or differ from their default."""
    check_choices(a)
    told, acting = {"loss", *BY_CHOICE}, {n: getattr(a, n) for n in FIELDS if n not in idle(a)}
    return {n: written(v) for n, v in acting.items() if n in told or v != FIELDS[n].default}


def row(a: Algorithm) -> str:
    """Return a preset's line of the large table."""
    more = [f"{n}={v}" for n, v in settings(a).items()
            if getattr(a, n) != FIELDS[n].default and n not in ("loss", "reduction")]  # fmt: skip
    source = f"[{a.source.rsplit('/', 1)[1]}]({a.source})"
    return table(
        f"[{a.name}](#{a.name})", a.data, f"{a.loss},<br>{a.reduction}", ", ".join(more), source
    )


def section(a: Algorithm) -> str:
    """Return the section of one preset."""
    lines = [table(f"`{n}`", v, meaning(a, n)) for n, v in settings(a).items()]
    head = f"### {a.name}\n\nTrained on {a.data}. Source: <{a.source}>\n\n"
    return head + "| field | value | meaning |\n|---|---|---|\n" + "\n".join(lines) + "\n"


def field_row(name: str) -> str:
    """Return a line of the table of fields."""
    given = FIELDS[name].metadata
    if name in CHOICES:
        values = " or ".join(given["values"])
    elif given["values"]:
        values = " … ".join(written(float(end)) for end in given["values"].strip("[]").split(", "))
    else:
        values = "text" if FIELDS[name].type is str else "False … True"
    return table(f"`{name}`", values, written(FIELDS[name].default), given["doc"])


def table(*cells: str) -> str:
    """Return a line of a table."""
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def page() -> str:
    """Return the whole page."""
    rl = [a for a in ROWS if a.data == "rollouts" and a.kl_anchor == "reference"]
    lists = {
        "again": [a.name for a in rl if a.advantage_std != "none"],
        "once": [a.name for a in rl if {a.advantage_mean, a.advantage_std} == {"none"}],
        "bare": [a.name for a in rl if {a.reward_std, a.advantage_std} == {"none"}],
        "free": [a.name for a in rl if not a.needs_anchor],
        "coupled": [a.name for a in rl if not a.decoupled],
    }
    reductions = ((how, equation(losses.loss_weights, how)) for how in REDUCTIONS)
    values = {
        "table": "\n".join(map(row, ROWS)),
        "fields": "\n".join(map(field_row, FIELDS)),
        "reductions": "\n".join(table(f"`{how}`", f"`{words}`") for how, words in reductions),
        "sections": "\n".join(map(section, ROWS)).rstrip(),
        **{name: ", ".join(f"`{row}`" for row in rows) for name, rows in lists.items()},
        **{step.__name__: equation(step) for step in STEPS},
    }
    filled = lambda found: textwrap.indent(values[found[2]], found[1])  # noqa: E731
    return re.sub(r"( *)@(\w+)@", filled, PAGE.with_suffix(".template.md").read_text())


if __name__ == "__main__":
    PAGE.write_text(page())
