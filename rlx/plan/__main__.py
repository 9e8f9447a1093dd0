"""`python -m rlx.plan --config=FILE --gpus=128 --gpu=h800`: plan a run before GPUs are rented.

Prints the fastest splits between servers and trainer, as strings for `allocation_mode`. Nothing is
started, and no GPU is needed. `python -m rlx.plan WORKDIR`, or --run=WORKDIR for other GPUs, takes
config and lengths of answers from a run. It fits the speeds to the run's seconds, and says what to
change. The report of the run then shows planned next to measured seconds.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from rlx.base import UserError, refuse, unknown
from rlx.cli import command
from rlx.doctor import failures
from rlx.doctor.gpu_cards import CARDS
from rlx.run import flags, plan_run


def main() -> int:
    """Print the plans; return 0."""
    first = sys.argv[1:2]
    run = [f"--run={workdir}" for workdir in first if not workdir.startswith("-")]
    config, values = flags.parse(
        [sys.argv[0], *(run or first), *sys.argv[2:]], config_needed=False,
        switches={"explain": "show the terms that a step's seconds are made of"},
        gpus="number of GPUs, of servers and trainer together",
        gpu=f"their kind: {', '.join(CARDS)}; this: measure this machine for two minutes",
        run="directory of a run to take config and lengths from",
        answer_tokens="mean length of answers; default: half of sampling.max_new_tokens",
        cut_share="share of answers that reach sampling.max_new_tokens; default: 0.1",
        prompt_tokens="mean length of prompts; default: half of data.max_prompt_tokens",
        turns="turns of an answer, between which tools or environments work; default: 1",
        observation_tokens="tokens that each further turn adds to the prompt; default: 0",
        tool_seconds="time of an answer outside the model, in all turns together; default: 0",
        allocation="predict for this allocation only",
        what_if="rollout.max_staleness=0,1,2,4: the best plan for each value of a key",
        timeline="write the best plan's simulated timeline for Perfetto to this file",
        dollars="price of a GPU for an hour",
    )  # fmt: skip
    for flag in ("answer_tokens", "cut_share", "prompt_tokens"):
        if (values.run or values.gpu == "this") and getattr(values, flag):
            what = f"--{flag} does nothing with a run, whose lengths are measured"
            raise UserError(f"{what}; leave it out, or plan by --config")
    if values.run and config is not None:
        what = "--config does nothing with a run, whose own config is planned"
        raise UserError(f"{what}; leave one of them out, or try a key by --what_if")
    if values.gpu == "this":
        if config is None:
            raise UserError("--gpu=this measures the run of a config; give --config=FILE")
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
            plan_run.probe(config, Path(place, "run"))
            vars(values).update(run=f"{place}/run", gpu="")
            return _show(None, values)
    if values.gpu and values.gpu not in CARDS:
        raise unknown("--gpu", values.gpu, CARDS)
    number = values.gpus.isdigit() and int(values.gpus) > 0
    refuse((
        (not (values.gpu or values.run),
         f"--gpu is not given; choose one of {', '.join(CARDS)}"),
        (not values.run and config is None,
         "neither --config nor --run; give --config=FILE, or --run=WORKDIR"),
        ((values.gpus or not values.run) and not number,
         f"--gpus={values.gpus!r} is not a number from 1; give --gpus=8"),
    ))  # fmt: skip
    return _show(config, values)


def _show(config: Any, values: Any) -> int:
    request = plan_run.PlanRequest.of(config, values, Path(values.run) if values.run else None)
    command.say("\n".join([*plan_run.lines(request)]))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    command.run(main, explain=failures.explain)
