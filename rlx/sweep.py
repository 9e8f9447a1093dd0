"""`rlx sweep --config=FILE KEY=V1,V2 seed=0,1,2 …`: a run for each combination of values.

Further --config.KEY=VALUE hold for all. The same command continues where it stopped. At the end it
prints a table and writes comparison.html. Exit status 1: some run has failed.
"""

import sys
from pathlib import Path
from zlib import crc32

from rlx.cli import command
from rlx.doctor import failures


def main() -> int:
    """Run what is left of the grid, then print the table; return the exit status."""
    p = command.Parser("rlx.sweep", description=__doc__, allow_abbrev=False)
    p.add_argument("axis", nargs="+", help="KEY=VALUE,VALUE; values in (…) may have commas")
    p.add_argument(
        "--jobs", type=int, default=1, help="runs at a time, which share cores and GPUs; or jobs"
    )
    some = command.number(0)
    p.add_argument("--random", type=some, default=0, metavar="N", help="N combinations; 0: all")
    halve = "stop the worse half at 2^-N of the steps, and after each doubling"
    p.add_argument("--halve", type=some, default=0, metavar="N", help=halve)
    p.add_argument("--workdir", type=Path, help="of all runs; default: under runs/, by the flags")
    argv = [word for word in sys.argv[1:] if word.startswith("--config")]
    a = p.parse_args([word for word in sys.argv[1:] if word not in argv])
    from rlx.config import default
    from rlx.observe.report_overlay import write_overlay
    from rlx.observe.run_table import summary, table
    from rlx.run import flags, run_grid

    stem = flags.config_file(["", *argv]).stem
    workdir = a.workdir or Path(f"runs/sweep-{stem}-{crc32(' '.join(sorted(argv)).encode()):08x}")
    runs = {name: [*argv, *choice] for name, choice in run_grid.grid(a.axis, a.random).items()}
    config = run_grid.config_of(argv)
    left, free = run_grid.unfinished_runs(runs, workdir), run_grid.slots(a.jobs, config)
    command.say(f"{workdir}: {len(left)} of {len(runs)} runs to do")
    try:
        status, survivors = run_grid.halve(runs, workdir, free, a.halve)
        if status == command.INTERRUPTED:
            return status
        rest = {name: argv for name, argv in left.items() if name in survivors}
        return run_grid.run_all(rest, workdir, free) or status
    finally:
        rows = [summary(workdir / n, default().to_dict()) for n in runs if (workdir / n).is_dir()]
        command.say("\n".join(table(rows)))
        if any(row["step"] for row in rows):
            command.say(write_overlay(workdir / "comparison.html", rows))


if __name__ == "__main__":
    command.run(main, explain=failures.explain)
