"""Write WORKDIR/report.html again and print its path: `python -m rlx.report WORKDIR`."""

from pathlib import Path

from rlx.cli import command
from rlx.doctor import failures


def main() -> None:
    """Write the reports of one or more runs; a run still going shows what it has so far."""
    parser = command.Parser("rlx.report", description=__doc__, allow_abbrev=False)
    parser.add_argument("workdir", nargs="+", type=Path, help="the --workdir of a run")
    arguments = parser.parse_args()

    from rlx.config import default
    from rlx.observe.run_report import write_report

    for workdir in arguments.workdir:
        command.say(write_report(workdir, default().to_dict()))


if __name__ == "__main__":
    command.run(main, explain=failures.explain)
