"""Writes docs/algorithms.md from the table of presets: python docs/algorithms.py

Prose stands in algorithms.template.md; tables and equations come from the rows of
rlx/algorithms/presets.py. What is written is chosen by the fields of a row, never by its name, so
the page says what the code does and changes with it. tests/algorithms/docs_test.py holds the
committed page against this.
"""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

from rlx import config
from rlx.algorithms.algorithm import Algorithm, choose
from rlx.algorithms.presets import PRESETS, resolve

PAGE = Path(__file__).with_suffix(".md")
TEMPLATE = Path(__file__).with_name("algorithms.template.md")


def fill(text: str, **values: str) -> str:
    """`text` with each @name@ replaced; LaTeX and f-strings both live on braces."""
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text


# What is written by a condition below and not looked up in a table knows these choices alone.
LEVELS = ("group", "batch", "none")
KNOWN = {
    **dict.fromkeys(("reward_mean", "reward_std", "advantage_mean", "advantage_std"), LEVELS),
    "ratio_level": ("token", "sequence"),
    "peers": ("prompt", "agent", "turn"),
    "kl_anchor": ("reference", "teacher"),
    "kl_placement": ("none", "reward", "loss"),
    "kl_estimator": ("k1", "k2", "k3"),
    "proximal": ("recompute", "loglinear", "behaviour"),
    "weight_level": ("token", "sequence"),
    "weight_action": ("none", "mask", "truncate"),
    "weight_statistic": ("ratio", "k1", "k2", "k3"),
    "weight_aggregate": ("mean", "sum", "max"),
}


def known(a: Algorithm) -> Algorithm:
    """Return the row, or raise UserError for a choice that this page has no words for."""
    for field, names in KNOWN.items():
        choose(field, getattr(a, field), dict.fromkeys(names))
    return a


# Words, for the big table.

REDUCTION_WORDS = {
    "token_mean": "token mean",
    "sequence_mean_token_mean": "sequence mean of token means",
    "sequence_mean_token_sum": "sequence mean of token sums",
    "constant": "sequence mean of token sums over a constant length",
    "prompt_mean": "prompt mean of token means",
}
LOSS_WORDS = {
    "clip": "clipped ratio",
    "sapo": "soft gate",
    "reinforce": "REINFORCE",
    "nll": "negative log-likelihood",
    "bradley_terry": "Bradley–Terry",
    "dpo": "DPO",
    "ipo": "IPO",
}
DATA_WORDS = {
    "rollouts": "its own rollouts",
    "demonstrations": "demonstrations",
    "pairs": "pairs of a chosen and a rejected answer",
}


def number(x: float) -> str:
    """A number as people write it."""
    return "∞" if math.isinf(x) else f"{x:g}".replace("e-0", "e-")


def clips(a: Algorithm) -> bool:
    """Whether the clip can bind: a ratio is never below 0."""
    return a.loss == "clip" and (a.clip_low < 1 or not math.isinf(a.clip_high))


def advantage_words(a: Algorithm) -> str:
    """What stands for the advantage."""
    if a.data != "rollouts":
        return "–"
    normalised = {a.reward_mean, a.reward_std} != {"none"}
    if a.critic:
        words = "critic, GAE"
    elif a.reward_scale == 0:
        words = "the KL term alone"
    elif not normalised:
        words = "the reward"
    else:
        words = ""
    if normalised:
        mean = "leave-one-out mean" if a.leave_one_out else "mean"
        words += f"{a.reward_mean} {mean}" if a.reward_mean != "none" else "no mean"
        words += f" / {a.reward_std} std" if a.reward_std != "none" else ""
        words += f" of each {a.peers}" if a.peers != "prompt" else ""
    if (a.gamma, a.lam) != (1, 1):
        words += f", γ = {a.gamma:g}, λ = {a.lam:g}"
    if (a.advantage_mean, a.advantage_std) != ("none", "none"):
        words += f", then {a.advantage_mean} mean / {a.advantage_std} std over tokens"
    return words


def loss_words(a: Algorithm) -> str:
    """The loss's name."""
    words = choose("loss", a.loss, LOSS_WORDS)
    if a.loss == "clip" and not clips(a):
        words = "ratio"
    if a.data != "rollouts":
        return words
    return words + ("" if a.decoupled else ", not decoupled")


def clip_words(a: Algorithm) -> str:
    """The clip's bounds."""
    if not clips(a):
        return "–"
    words = f"[1 − {number(a.clip_low)}, 1 + {number(a.clip_high)}]"
    if a.ratio_level == "sequence":
        words += " of the sequence"
    return words + (f", dual {a.dual_clip:g}" if a.dual_clip else "")


def kl_words(a: Algorithm) -> str:
    """Where a KL term is, to whom, and how strong."""
    if a.kl_placement == "none":
        return "log-ratio to the reference" if a.needs_anchor else "–"
    beta = f"β = {number(a.kl_coefficient)}" + (" at first" if a.kl_target else "")
    return f"{a.kl_estimator} to the {a.kl_anchor}, in the {a.kl_placement}, {beta}"


def filter_words(a: Algorithm) -> str:
    """What is not trained on, and what long answers cost."""
    words = []
    if a.drop_equal_rewards:
        words.append("groups of equal rewards are rejected and others sampled")
    if a.overlong_filter:
        words.append("nothing of answers cut off by length")
    if a.overlong_buffer:
        zone = a.overlong_buffer
        size = f"{100 * zone:g} % of the limit" if zone < 1 else f"{zone:g} tokens"
        words.append(f"overlong penalty in the last {size}")
    if a.second_moment:
        words.append(f"tokens past a second moment of {a.second_moment:g}")
    if a.data == "rollouts" and a.decoupled and a.weight_action != "none":
        words.append(f"w of a {a.weight_level} above {number(a.weight_upper)}: {a.weight_action}")
    return "; ".join(words) or "–"


def row(a: Algorithm) -> str:
    """A line of the big table."""
    known(a)
    cells = (
        f"[{a.name}](#{a.name})",
        advantage_words(a),
        loss_words(a),
        choose("reduction", a.reduction, REDUCTION_WORDS)
        if a.data != "pairs"
        else "mean over pairs",
        clip_words(a),
        kl_words(a),
        filter_words(a),
        f"[{a.source.rsplit('/', 1)[1]}]({a.source})",
    )
    return "| " + " | ".join(cells) + " |"


# Equations. Each function gives lines of one `aligned` block.

TARGET, PROXIMAL, BEHAVIOUR = r"\pi_\theta", r"\pi_{\text{prox}}", r"\pi_{\text{beh}}"
ANCHOR = {"reference": r"\pi_{\text{ref}}", "teacher": r"\pi_{\text{teacher}}"}
ESTIMATORS = {
    "k1": r"\Delta_{i,t}",
    "k2": r"\tfrac12\,\Delta_{i,t}^2",
    "k3": r"e^{-\Delta_{i,t}} - 1 + \Delta_{i,t}",
}
REDUCTIONS = {
    "token_mean": r"\frac{1}{\sum_i L_i}\sum_i\sum_t @each@",
    "sequence_mean_token_mean": r"\frac1N\sum_i\frac{1}{L_i}\sum_t @each@",
    "sequence_mean_token_sum": r"\frac1N\sum_i\sum_t @each@",
    "constant": r"\frac{1}{N\,L_{\max}}\sum_i\sum_t @each@",
    "prompt_mean": r"\frac1P\sum_p\frac{1}{\sum_{i \in p} L_i}\sum_{i \in p}\sum_t @each@",
}


def tex(x: float) -> str:
    """A number in an equation."""
    if not 0 < x < 1e-2:
        return f"{x:g}"
    power = math.floor(math.log10(x))
    head = f"{x / 10**power:g}"
    return ("" if head == "1" else rf"{head}\cdot ") + f"10^{{{power}}}"


def times(factor: float, power: str = "") -> str:
    """A factor before something; nothing where it is 1."""
    if factor == 1:
        return ""
    return tex(factor) + (f"^{{{power}}}" if power else "") + r"\,"


def reward_lines(a: Algorithm) -> list[str]:
    """From a trajectory's reward to the number that its last token gets."""
    lines, name = [], "r"
    if a.overlong_buffer:
        zone = a.overlong_buffer
        penalty = r"""\tilde r_i &= r_i + \min\Bigl(-@f@\frac{L_i - (L_{\max} - L_{\text{over}})}
            {L_{\text{over}}},\ 0\Bigr), \qquad L_{\text{over}} = @zone@"""
        size = rf"{zone:g}\,L_{{\max}}" if zone < 1 else f"{zone:g}"
        lines.append(fill(penalty, f=times(a.overlong_factor), zone=size))
        name = r"\tilde r"
    if a.reward_scale == 0:
        return lines
    shaped = f"{name}_i"
    if a.reward_mean != "none":
        mean = r"\mathrm{mean}_{\text{@peers@}}(@x@)"
        if a.leave_one_out:
            mean = r"\frac{1}{@size@-1}\sum_{j \ne i} @x@_j"
        size = "G" if a.reward_mean == "group" else "N"
        shaped += " - " + fill(mean, peers=a.reward_mean, x=name, size=size)
    if a.reward_std != "none":
        over = r"\frac{@top@}{\mathrm{std}_{\text{@peers@}}(@x@) + 10^{-5}}"
        shaped = fill(over, top=shaped, peers=a.reward_std, x=name)
    return [*lines, f"x_i &= {shaped}"]


def advantage_lines(a: Algorithm) -> list[str]:
    """From there to the advantage of each token."""
    normalised = (a.advantage_mean, a.advantage_std) != ("none", "none")
    name = r"\hat A_{i,t}" if normalised else "A_{i,t}"
    lines = return_lines(a, name)
    if a.kl_placement == "reward":
        lines.append(kl_line(a, PROXIMAL if a.proximal == "recompute" else BEHAVIOUR))
    if normalised:
        out = name
        if a.advantage_mean != "none":
            out += fill(r" - \mathrm{mean}_{\text{@p@}}(\hat A)", p=a.advantage_mean)
        if a.advantage_std != "none":
            over = r"\frac{@top@}{\mathrm{std}_{\text{@p@}}(\hat A) + 10^{-5}}"
            out = fill(over, top=out, p=a.advantage_std)
        lines.append(rf"A_{{i,t}} &= {out}")
    return lines


def return_lines(a: Algorithm, name: str) -> list[str]:
    """GAE, as far as there is something to sum."""
    if not a.critic and a.kl_placement != "reward":
        return [rf"{name} &= {times(a.gamma * a.lam, 'L_i - t')}x_i"]
    step = "" if a.reward_scale == 0 else r"\mathbf{1}[t = L_i]\,x_i"
    if a.kl_placement == "reward":
        step += rf" - {times(a.kl_coefficient)}\mathrm{{{a.kl_estimator}}}_{{i,t}}"
    if a.critic:
        step += rf" + {times(a.gamma)}V_{{i,t+1}} - V_{{i,t}}"
    if a.gamma * a.lam == 0:
        return [rf"{name} &= {step}"]
    total = rf"\sum_{{s \ge t}} {times(a.gamma * a.lam, 's - t')}\delta_{{i,s}}"
    return [rf"\delta_{{i,t}} &= {step}", rf"{name} &= {total}"]


def kl_line(a: Algorithm, policy: str) -> str:
    """The estimator of KL(policy ‖ anchor) from one token."""
    line = r"""\mathrm{@k@}_{i,t} &= @right@, \qquad
        \Delta_{i,t} = \log\frac{@policy@(o_{i,t})}{@anchor@(o_{i,t})}"""
    return fill(
        line, k=a.kl_estimator, right=ESTIMATORS[a.kl_estimator], policy=policy,
        anchor=ANCHOR[a.kl_anchor],
    )  # fmt: skip


def quotient(top: str, bottom: str, a: Algorithm) -> str:
    """A ratio of two policies, of a token or of a sequence."""
    each = fill(r"\frac{@top@(o_{i,t})}{@bottom@(o_{i,t})}", top=top, bottom=bottom)
    if a.ratio_level == "token":
        return each
    return fill(r"\exp\Bigl(\frac{1}{L_i}\sum_t \log@each@\Bigr)", each=each)


def indexed(letter: str, a: Algorithm) -> str:
    """A ratio's symbol: of a token or of a sequence."""
    return f"{letter}_i" if a.ratio_level == "sequence" else f"{letter}_{{i,t}}"


def ratio_lines(a: Algorithm) -> list[str]:
    """The importance ratio u and the behaviour weight w."""
    lines, anchor = [], BEHAVIOUR if a.proximal == "behaviour" else PROXIMAL
    if a.loss != "reinforce":
        lines.append(f"{indexed('u', a)} &= {quotient(TARGET, anchor, a)}")
    if not a.decoupled:
        return lines
    weight = quotient(TARGET if a.loss == "reinforce" else anchor, BEHAVIOUR, a)
    name = indexed("w", a)
    line = rf"{name} &= \mathrm{{sg}}\Bigl[{weight}\Bigr]"
    if a.weight_action != "none":
        what = name
        if a.weight_level == "sequence":
            what = rf"\text{{{a.weight_aggregate} of }} w_i"
        if not math.isinf(a.weight_lower):
            what = rf"{a.weight_lower:g} \le {what}"
        what += rf" \le {a.weight_upper:g}"
        how = {"mask": r"0 \text{ unless }", "truncate": r"\text{truncated to }"}[a.weight_action]
        line += rf", \quad {how} {what}"
        if a.weight_statistic != "ratio":
            line += rf" \text{{ in {a.weight_statistic}}}"
    return [*lines, line]


def token_loss(a: Algorithm) -> list[str]:
    """The loss ℓ of a token."""
    values = {"u": indexed("u", a), "A": "A_{i,t}"}
    gate = r"""\ell_{i,t} &= -@A@\,\frac{4}{\tau}\,\sigma\bigl(\tau\,(@u@ - 1)\bigr), \qquad
        \tau = @plus@ \text{ where } @A@ \gt 0,\quad @minus@ \text{ elsewhere}"""
    plus, minus = tex(a.sapo_positive), tex(a.sapo_negative)
    lines = {
        "nll": lambda: [r"\ell_{i,t} &= -\log \pi_\theta(o_{i,t})"],
        "reinforce": lambda: [fill(r"\ell_{i,t} &= -@A@\,\log\pi_\theta(o_{i,t})", **values)],
        "sapo": lambda: [fill(gate, plus=plus, minus=minus, **values)],
        "clip": lambda: clip_loss(a, values),
    }
    return choose("loss", a.loss, lines)()


def clip_loss(a: Algorithm, values: dict[str, str]) -> list[str]:
    """The clipped loss of a token, as far as its clip can bind."""
    if not clips(a):
        return [fill(r"\ell_{i,t} &= -@u@\,@A@", **values)]
    clip = r"""\ell_{i,t} &= \max\bigl(-@u@\,@A@,\
        -\mathrm{clip}(@u@,\ 1 - @low@,\ @high@)\,@A@\bigr)"""
    high = r"\infty" if math.isinf(a.clip_high) else f"1 + {tex(a.clip_high)}"
    lines = [fill(clip, low=tex(a.clip_low), high=high, **values)]
    if a.dual_clip:
        dual = r"&\phantom{=}\ \text{and at most } -@c@\,@A@ \text{ where } @A@ \lt 0"
        lines.append(fill(dual, c=tex(a.dual_clip), **values))
    return lines


def loss_lines(a: Algorithm) -> list[str]:
    """A token's loss, and what is minimised: sums first, one division."""
    lines = token_loss(a)
    each = rf"{indexed('w', a)}\,\ell_{{i,t}}" if a.decoupled and a.loss != "nll" else r"\ell_{i,t}"
    if a.kl_placement == "loss":
        lines += [kl_line(a, TARGET), drawn_line(a)]
        each += (
            rf" + {times(a.kl_coefficient)}{indexed('d', a)}\,\mathrm{{{a.kl_estimator}}}_{{i,t}}"
        )
    if a.entropy_coefficient:
        each += rf" - {times(a.entropy_coefficient)}H_{{i,t}}"
    if " + " in each or " - " in each:
        each = rf"\bigl({each}\bigr)"
    if a.second_moment:
        lines.append(second_moment_line(a))
        each = rf"\mathbf{{1}}[(i,t) \in M]\,{each}"
    lines.append(r"\mathcal{L} &= " + fill(REDUCTIONS[a.reduction], each=each))
    return [*lines, value_line(a)] if a.critic else lines


def drawn_line(a: Algorithm) -> str:
    """The weight of KL in the loss."""
    used = {"w": a.decoupled, "u": a.loss != "reinforce"}
    ratios = [indexed(letter, a) for letter, use in used.items() if use]
    return rf"{indexed('d', a)} &= \mathrm{{sg}}\bigl[{' '.join(ratios) or 1}\bigr]"


def second_moment_line(a: Algorithm) -> str:
    """Which tokens M2PO keeps."""
    line = r"""M &= \text{the largest set of tokens, nearest first, with }\
        \mathrm{mean}_{M}\Bigl(\log\frac{@beh@(o)}{@prox@(o)}\Bigr)^2 \lt @limit@"""
    return fill(line, beh=BEHAVIOUR, prox=PROXIMAL, limit=f"{a.second_moment:g}")


def value_line(a: Algorithm) -> str:
    """The critic's own loss."""
    plain, before = r"(V_{i,t} - R_{i,t})^2", r"V^{\text{prox}}_{i,t}"
    raw = "A" if (a.advantage_mean, a.advantage_std) == ("none", "none") else r"\hat A"
    loss = rf"\tfrac12\,{plain}"
    if a.value_clip:
        held = r"\bigl(\mathrm{clip}(V_{i,t},\ @before@ \pm @e@) - R_{i,t}\bigr)^2"
        held = fill(held, before=before, e=tex(a.value_clip))
        loss = rf"\tfrac12\max\Bigl({plain},\ {held}\Bigr)"
    mean = fill(REDUCTIONS["token_mean"], each=loss)
    return rf"\mathcal{{L}}_V &= {mean}, \qquad R_{{i,t}} = {raw}_{{i,t}} + {before}"


def pair_lines(a: Algorithm) -> list[str]:
    """Of losses on a chosen (+) and a rejected (−) answer."""
    beta = tex(a.pair_beta)
    each = choose(
        "loss",
        a.loss,
        {
            "bradley_terry": r"-\log\sigma(z)",
            "dpo": rf"-\log\sigma({beta}\,z)",
            "ipo": rf"\Bigl(z - \frac{{1}}{{2\cdot {beta}}}\Bigr)^2",
        },
    )
    difference = r"z &= s_\theta(o^+) - s_\theta(o^-)"
    if a.loss != "bradley_terry":
        weight = r"\frac{1}{L^\pm}" if a.reduction == "sequence_mean_token_mean" else ""
        side = r"z^\pm &= @weight@\sum_t \log\frac{\pi_\theta(o^\pm_t)}{@ref@(o^\pm_t)}, \qquad"
        difference = fill(side + " z = z^+ - z^-", weight=weight, ref=ANCHOR[a.kl_anchor])
    return [difference, rf"\mathcal{{L}} &= \frac1P\sum_{{\text{{pairs}}}} {each}"]


def equation(a: Algorithm) -> str:
    """All of a row as one block."""
    known(a)
    if a.data == "pairs":
        lines = pair_lines(a)
    elif a.data == "demonstrations":
        lines = loss_lines(a)
    else:
        lines = [*reward_lines(a), *advantage_lines(a), *ratio_lines(a), *loss_lines(a)]
    body = " \\\\\n".join(" ".join(line.split()) for line in lines)
    return f"```math\n\\begin{{aligned}}\n{body}\n\\end{{aligned}}\n```"


# The page.


def trained(a: Algorithm) -> Algorithm:
    """A row as a run has it, but for the lengths that a run fills in."""
    c = config.default().algorithm
    c.preset = a.name
    lengths = {k: getattr(a, k) for k in ("overlong_buffer", "overlong_limit", "constant_length")}
    return dataclasses.replace(resolve(c, 1024), **lengths)


ROWS = [trained(a) for a in PRESETS.values()]


def section(a: Algorithm) -> str:
    """One preset."""
    return (
        f"### {a.name}\n\nTrained on {DATA_WORDS[a.data]}. Source: <{a.source}>\n\n{equation(a)}\n"
    )


def reduction_row(name: str) -> str:
    """A line of the table of reductions, with the rows that use it."""
    formula = fill(REDUCTIONS[name], each=r"\ell_{i,t}")
    users = names(lambda a: a.reduction == name and a.data != "pairs")
    return f"| `{name}` | $`\\displaystyle {formula}`$ | {users} |"


def names(choice: Callable[[Algorithm], bool]) -> str:
    """The rows that a condition holds for."""
    return ", ".join(f"`{a.name}`" for a in ROWS if choice(a)) or "–"


def rl(a: Algorithm) -> bool:
    """Whether a row learns from rewards of its own rollouts."""
    return a.data == "rollouts" and a.kl_anchor == "reference"


def page() -> str:
    """The whole page."""
    rows = sorted(ROWS, key=lambda a: not rl(a))  # the others last, else as they stand
    once = {"none"}
    return fill(
        TEMPLATE.read_text(),
        table="\n".join(row(a) for a in rows),
        reductions="\n".join(reduction_row(name) for name in REDUCTIONS),
        sections="\n".join(section(a) for a in rows).rstrip(),
        again=names(lambda a: rl(a) and a.advantage_std != "none"),
        once=names(lambda a: rl(a) and {a.advantage_mean, a.advantage_std} == once),
        bare=names(lambda a: rl(a) and {a.reward_std, a.advantage_std} == once),
        free=names(lambda a: rl(a) and not a.needs_anchor),
        coupled=names(lambda a: rl(a) and not a.decoupled),
    )


if __name__ == "__main__":
    PAGE.write_text(page())
