"""`rlx runs [DIR…]`: a table of the runs under directories, by the files that are there.

`changed` are the keys that a run's command line gives, or that differ from the defaults where it
was started from Python.
"""

import json
from pathlib import Path

from rlx.cli import command


def main() -> None:
    """Print a row for each run, or a JSON list of them."""
    parser = command.Parser("rlx.runs", description=__doc__, allow_abbrev=False)
    parser.add_argument("place", nargs="*", type=Path, default=[Path("runs")], help="default: runs")
    parser.add_argument("--json", action="store_true", help="all fields, as a list of objects")
    parser.add_argument("--sort", default="run", help="field or config key; largest number first")
    arguments = parser.parse_args()
    from rlx.config import default
    from rlx.observe import run_table

    usual = default().to_dict()
    runs = {place: run_table.find([place]) for place in arguments.place}
    every = dict.fromkeys(path for paths in runs.values() for path in paths)
    rows = [run_table.summary(path, usual) for path in every]
    rows = run_table.sorted_rows(rows, arguments.sort)
    empty = [f"no run under {place}" for place, paths in runs.items() if not paths]
    lines = [*(run_table.table(rows) if rows else []), *empty]
    command.say(json.dumps(rows, indent=2) if arguments.json else "\n".join(lines))


if __name__ == "__main__":
    command.run(main)
