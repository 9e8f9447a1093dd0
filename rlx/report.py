"""Write WORKDIR/report.html again, or the curves of several runs over one another in one page.

`python -m rlx.report WORKDIR` prints the path, `rlx report A B C` and `rlx report DIR-OF-RUNS` that
of the page of several. A run still going shows what it has so far.
"""

from pathlib import Path

from rlx.base import UserError
from rlx.cli import command
from rlx.doctor import failures


def main() -> None:
    """Write the report of one run, or the page of several."""
    parser = command.Parser("rlx.report", description=__doc__, allow_abbrev=False)
    parser.add_argument("workdir", nargs="+", type=Path, help="of a run, or a directory of runs")
    parser.add_argument("--out", type=Path, help="file for several runs; default: comparison.html")
    arguments = parser.parse_args()

    from rlx.config import default
    from rlx.observe.report_overlay import write_overlay
    from rlx.observe.run_report import write_report
    from rlx.observe.run_table import find, summary

    places, usual = arguments.workdir, default().to_dict()
    if len(places) == 1 and find(places) in ([], places):
        if arguments.out:
            raise UserError(f"--out is for several runs; {places[0]} gets its report.html, drop it")
        command.say(write_report(places[0], usual))
    else:
        out = arguments.out or Path("comparison.html")
        command.say(write_overlay(out, [summary(path, usual) for path in find(places)]))


if __name__ == "__main__":
    command.run(main, explain=failures.explain)
