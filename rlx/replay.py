"""Train a run's recorded batches again, and compare: `python -m rlx.replay WORKDIR`.

Metrics and weights are compared bit for bit. --generation also makes the samples again.
--config.KEY=VALUE trains with other settings on the same data. Exit status 1: something differs,
though no setting was changed.
"""

import sys
from pathlib import Path

from rlx.base import UserError
from rlx.cli import command
from rlx.doctor import failures


def main() -> int:
    """Replay steps of a run, or write a bundle of them; return the exit status."""
    p = command.Parser("rlx.replay", description=__doc__, allow_abbrev=False)
    p.add_argument("run", type=Path, help="WORKDIR of a run, or a bundle")
    count = command.number(1)
    p.add_argument("--from", type=count, default=0, dest="first", help="first step, from 1")
    p.add_argument("--until", type=count, default=0, help="last step")
    p.add_argument("--bundle", type=Path, help="write a file to replay these steps elsewhere")
    p.add_argument("--out", type=Path, help="new directory for metrics.jsonl and the final hf/")
    p.add_argument(
        "--generation", type=count, nargs="?", const=sys.maxsize, default=0, metavar="N",
        help="also make all samples, or N of each step, again (JAX engine), and compare tokens",
    )  # fmt: skip
    settings = [word for word in sys.argv[1:] if word.startswith("--config.")]
    a = p.parse_args([word for word in sys.argv[1:] if word not in settings])
    from rlx.run import replay_run

    if a.generation and settings:
        raise UserError(
            f"--generation needs the run's weights, and {settings[0]} changes them; leave one out"
        )
    if a.out and a.out.exists():
        raise UserError(f"--out={a.out} exists; give a new directory")
    with replay_run.open_run(a.run) as workdir:
        recorded = replay_run.Recorded(workdir)
        plan = replay_run.plan(recorded, a.first, a.until, bool(a.generation))
        if a.bundle:
            replay_run.write_bundle(a.bundle, recorded, plan)
            command.say(f"wrote {a.bundle}; to replay it: python -m rlx.replay {a.bundle}")
            return 0
        changed = replay_run.changes(recorded.config(plan.last), settings)
        args = recorded, plan, changed, command.say, a.out
        if a.generation:
            from rlx.run.replay_generation import Generation

            samples = Generation(recorded, plan, a.generation, command.say)
            same = replay_run.replay(*args, samples.after)
            command.say(samples.end())
        else:
            same = replay_run.replay(*args)
    return 0 if same or changed else 1


if __name__ == "__main__":
    command.run(main, explain=failures.explain)
