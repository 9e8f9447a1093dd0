"""Draw the distribution of publish stalls from the files that the benchmark's --json writes.

python experiments/2026-11-vllm-fleet/plot.py stalls.png tiny.json 0.5b.json
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def main() -> None:
    target, *sources = sys.argv[1:]
    figure, axes = plt.subplots(1, len(sources), figsize=(5.5 * len(sources), 3.6), squeeze=False)
    for axis, source in zip(axes[0], sources, strict=True):
        figures = json.loads(Path(source).read_text())
        ways = [name for name in figures if figures[name].get("stall")]
        axis.boxplot([figures[name]["stall"] for name in ways], orientation="horizontal")
        for row, name in enumerate(ways, 1):
            axis.plot(figures[name]["stall"], [row] * len(figures[name]["stall"]), ".", alpha=0.4)
        axis.set_yticks(range(1, len(ways) + 1), ways)
        axis.invert_yaxis()
        axis.set_xscale("log")
        axis.set_xlabel("pause to resume, ms")
        axis.set_title(Path(source).stem)
    figure.tight_layout()
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    main()
