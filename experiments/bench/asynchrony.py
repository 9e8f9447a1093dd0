"""Compare asynchronous with synchronous training: steps per second, and which side waits.

    python -m experiments.bench.asynchrony --cores=0,1 [--steps=40] [--rounds=2]

Runs configs/arithmetic.py with max_staleness 0, 1, 2 and 4; nothing else differs. "trainer waits"
is the share of time in which the trainer had no batch. "server idle" is the share in which the
server neither decoded nor prefilled.
"""

import argparse
import tempfile
from pathlib import Path

from experiments.bench.process import cores_of, median_spread, rlx_run


def main() -> None:
    """Print one row per max_staleness."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cores", type=cores_of, default=[0, 1])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=2)
    a = parser.parse_args()
    rows: dict[int, list[dict]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for n in range(a.rounds):
            for staleness in (0, 1, 2, 4):
                records = rlx_run(
                    "configs/arithmetic.py", Path(scratch) / f"{staleness}-{n}", a.cores,
                    f"--config.total_steps={a.steps}", "--config.eval.num_questions=0",
                    f"--config.rollout.max_staleness={staleness}",
                )  # fmt: skip
                rows.setdefault(staleness, []).extend(records[a.steps // 4 :])
    print("max_staleness  s/step median [quartiles]  steps/s  speed-up  trainer waits  server idle")
    rate = {k: len(v) / sum(r["step_seconds"] for r in v) for k, v in rows.items()}
    for staleness, records in rows.items():
        total = sum(r["step_seconds"] for r in records)
        waits = sum(r["seconds"].get("wait", 0.0) for r in records) / total
        idle = 1 - sum(r["server_busy_seconds"] for r in records) / total
        print(
            f"{staleness:>13}  {median_spread([r['step_seconds'] for r in records]):>25}  "
            f"{rate[staleness]:7.2f}  {rate[staleness] / rate[0]:8.2f}  {waits:13.0%}  {idle:11.0%}"
        )


if __name__ == "__main__":
    main()
