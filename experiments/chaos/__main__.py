"""Disturb a training run, or simulate disturbed runs; --help lists the flags.

    python -m experiments.chaos --faults=200 --together=4 --seed=1 --out=DIR
    python -m experiments.chaos --faults=40 --together=4 --engine=vllm
    python -m experiments.chaos --faults=0 --steps=150 --seed=2 --out=DIR    # undisturbed
    python -m experiments.chaos --simulate=10000

The first writes DIR/chaos.json: each fault, and what the oracle found. The learning curve is
compared with those of undisturbed runs, which are recorded. Exit status 1: something is wrong.
A full disk needs root, and clocks that jump need a C compiler: `left_out` names what is not done.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from experiments.chaos import campaign, oracle, simulation

UNDISTURBED = campaign.HERE.parent / "2026-12-chaos" / "undisturbed.json"  # seed → curve


def table(rows: list[tuple[str, float, str]]) -> str:
    """Return a Markdown table: a row for each kind of fault, and one for all."""
    lines = ["| fault | times | s to recover, p50 | max | went wrong |", "|---|---|---|---|---|"]
    for kind in [*sorted({kind for kind, *_ in rows}), "all"]:
        chosen = [(s, bool(text)) for k, s, text in rows if kind in (k, "all")] or [(0.0, False)]
        times, wrong = zip(*chosen, strict=True)
        middle, most = statistics.median(times), max(times)
        lines.append(f"| {kind} | {len(times)} | {middle:.1f} | {most:.1f} | {sum(wrong)} |")
    return "\n".join(lines)


def disturb(
    out: Path, faults: int, seed: int, seconds: float = math.inf, steps: int = 0, together: int = 1,
    engine: str = "jax",
) -> dict:  # fmt: skip
    """Run a campaign in an empty directory and judge it; return its record."""
    begun = time.monotonic()
    run = campaign.Campaign(out, seed, lambda text: print(text, flush=True), engine)
    bound, batch = (
        campaign.SETTINGS[f"rollout.{key}"] for key in ("max_staleness", "batch_prompts")
    )
    try:
        try:
            run.run(faults, seconds, steps, together)
        finally:
            run.close()
        record = {"seconds": time.monotonic() - begun, "steps": run.step()[1], "rows": run.rows}
        record |= {"engine": engine, "left_out": run.left_out}
        record |= {"problems": run.problems, "facts": oracle.facts(run.workdir, batch, bound)}
        record["held_out"] = oracle.held_out(run.workdir)
        others = json.loads(UNDISTURBED.read_text()) if UNDISTURBED.exists() else {}
        if faults and others and record["held_out"][1:]:
            record["learning"] = oracle.apart(record["held_out"], list(others.values()))
        command = [sys.executable, "-m", "experiments.chaos.oracle", str(run.workdir), str(bound)]
        replay = subprocess.run(
            command, capture_output=True, text=True, env=campaign.environment(out)
        )
        record["replay"] = json.loads(replay.stdout) if replay.stdout else replay.stderr[-900:]
        return record | {"good": oracle.good(record)}
    finally:
        run.keep()


def main() -> int:
    """Run the command line."""
    p = argparse.ArgumentParser("experiments.chaos", description=__doc__)
    p.add_argument("--faults", type=int, default=10)
    p.add_argument("--seconds", type=float, default=math.inf, help="begin no fault after this")
    p.add_argument("--steps", type=int, default=0, help="go on until this step")
    p.add_argument("--together", type=int, default=1, help="faults before the run may recover")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--engine", default="jax", choices=("jax", "vllm"), help="of the servers")
    p.add_argument("--out", default="", help="new directory; default: a temporary one")
    p.add_argument("--simulate", type=int, default=0, help="schedules to simulate instead")
    a = p.parse_args()
    if a.simulate:
        found = list(simulation.search(range(a.seed, a.seed + a.simulate)))
        print("\n".join(f"{what}\n  {plan}" for plan, what in found), len(found), "schedules fail")
        return int(bool(found))
    out = Path(a.out or tempfile.mkdtemp(prefix="rlx-chaos-")).absolute()
    out.mkdir(exist_ok=True)
    record = disturb(out, a.faults, a.seed, a.seconds, a.steps, a.together, a.engine)
    (out / "chaos.json").write_text(json.dumps(record, indent=1))
    print(table(record.pop("rows")), json.dumps(record), sep="\n\n")
    return int(not record["good"])


if __name__ == "__main__":
    sys.exit(main())
