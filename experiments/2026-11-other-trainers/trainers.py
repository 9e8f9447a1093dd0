"""The runs of this experiment, their records, tables and plots.

    python -m experiments.2026-11-other-trainers.trainers run OUT --cores=0,1 --seeds=0
    python -m experiments.2026-11-other-trainers.trainers keep OUT      # OUT → records/
    python -m experiments.2026-11-other-trainers.trainers draw          # records/ → tables, plots

`run` first makes the teacher, OUT/teacher, by configs/arithmetic.py. Then it runs each config
(`--only=dpo,ipo` selects) in OUT/NAME/seed-N. Finished runs are skipped.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

from experiments import sweep

HERE = Path(__file__).parent
RECORDS = HERE / "records"
DATASETS = ("sft", "reward_model", "dpo", "ipo")
TAUGHT = {  # the last ones are distill_mixed with other coefficients; with 0 it is GRPO
    "distill": (),
    "distill_mixed": (),
    "no_pull": ("--config.algorithm.kl_coefficient=0",),
    "strong_pull": ("--config.algorithm.kl_coefficient=1",),
}
COLUMNS = {
    "greedy_acc": "greedy accuracy",
    "held_out_sft_loss": "loss",
    "held_out_pair_loss": "loss",
    "held_out_pair_accuracy": "pairs right",
    "held_out_pair_margin": "margin",
}
OF_STEPS = (  # kept of metrics.jsonl
    "elapsed_seconds", "step_seconds", "task_reward", "kl_reward", "reference_kl",
    "generated_tokens_per_second", "teacher_busy_seconds", "server_busy_seconds", "staleness_max",
)  # fmt: skip


def run(out: Path, cores: list[int], seeds: list[int], names: list[str]) -> None:
    """Train the teacher if missing, then each config with each seed."""
    weights = out / "teacher" / "hf"
    if not (out / "teacher" / "report.html").exists():
        command = [sys.executable, "-m", "rlx.main", "--config=configs/arithmetic.py"]
        subprocess.run(
            [*command, f"--workdir={weights.parent}"],
            check=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
    for seed in seeds:
        for name in names:
            flags = [f"--config.teacher.path={weights}", *TAUGHT[name]] if name in TAUGHT else []
            config = "distill_mixed" if name.endswith("_pull") else name
            sweep.run(out, f"configs/arithmetic_{config}.py", {name: flags}, [seed], cores)


def keep(out: Path) -> None:
    """Write one record for each finished run: its evaluations, and a few series of its steps."""
    RECORDS.mkdir(exist_ok=True)
    runs = {"teacher": out / "teacher"}
    for name in (*DATASETS, *TAUGHT):
        runs |= {f"{name}-{p.name.removeprefix('seed-')}": p for p in out.glob(f"{name}/seed-*")}
    for name, workdir in runs.items():
        steps = sweep.records(workdir / "metrics.jsonl")
        config = json.loads((workdir / "config.json").read_text())
        if len(steps) < config["total_steps"]:
            continue
        series = {k: [_short(s[k]) for s in steps] for k in OF_STEPS if k in steps[0]}
        series["trainer_waits"] = [_short(s["seconds"].get("wait", 0.0)) for s in steps]
        evaluations = [
            {k: _short(v) for k, v in e.items()} for e in sweep.records(workdir / "eval.jsonl")
        ]
        parts = [
            f'"steps": {json.dumps(series)}',
            '"evaluations": [\n  ' + ",\n  ".join(map(json.dumps, evaluations)) + "\n]",
        ]
        (RECORDS / f"{name}.json").write_text("{" + ",\n".join(parts) + "}\n")


def _short(value: float) -> float:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def kept(name: str) -> dict[str, dict]:
    """Return the records of a config by seed."""
    paths = sorted(RECORDS.glob(f"{name}-[0-9]*.json"))
    return {p.stem.rpartition("-")[2]: json.loads(p.read_text()) for p in paths}


def tables() -> None:
    """Print the results in markdown: on datasets, then with a teacher."""
    print("| run | seed | steps | held out, first → last | best greedy | seconds in all |")
    print("|---|---|---|---|---|---|")
    for name in DATASETS:
        for seed, record in kept(name).items():
            first, *_, last = evaluations = record["evaluations"]
            known = {k: n for k, n in COLUMNS.items() if k in last}
            shown = "; ".join(f"{n} {_start(k, first)}{last[k]:.4g}" for k, n in known.items())
            cells = [name, seed, last["step"], shown, _best(evaluations), _seconds(last)]
            print("| " + " | ".join(map(str, cells)) + " |")
    print(
        "\n| run | seed | greedy at the end | best | seconds in all | KL to the teacher "
        "| scored a second | while busy | busy | wait |"
    )
    print("|---" * 10 + "|")
    for name in TAUGHT:
        for seed, record in kept(name).items():
            last = record["evaluations"][-1]
            cells = [name, seed, f"{last['greedy_acc']:.3f}", _best(record["evaluations"])]
            print("| " + " | ".join([*cells, _seconds(last), *_taught(record["steps"])]) + " |")


def _start(key: str, first: dict) -> str:
    """Return the first value and an arrow; empty if all scores were still equal."""
    return "" if key == "held_out_pair_accuracy" else f"{first[key]:.4g} → "


def _best(evaluations: list[dict]) -> str:
    """Return the best greedy accuracy, and the first step with it."""
    best, step = max((e.get("greedy_acc", -1), -e["step"]) for e in evaluations)
    return f"{best:.3f} at {-step}" if best >= 0 else "–"


def _seconds(last: dict) -> str:
    return f"{last['elapsed_seconds']:.0f}"


def _taught(steps: dict) -> list[str]:
    """Return the KL at both ends (medians of nine steps), and the teacher's speed from step 11 on.

    The median is used because one unlikely sampled token makes k3 large. All generated tokens of
    finished completions have been scored.
    """
    kl = steps["reference_kl"]
    seconds, speed = steps["step_seconds"][10:], steps["generated_tokens_per_second"][10:]
    tokens = sum(s * v for s, v in zip(seconds, speed, strict=True))
    busy = sum(steps["teacher_busy_seconds"][10:])
    return [
        f"{median(kl[:9]):.4f} → {median(kl[-9:]):.4f}",
        f"{tokens / sum(seconds):,.0f}",
        f"{tokens / busy:,.0f}",
        f"{busy / sum(seconds):.2f}",
        f"{sum(steps['trainer_waits'][10:]) / sum(seconds):.2f}",
    ]


def draw_datasets(path: Path) -> None:
    """Draw accuracy, loss, ordered pairs and margins of the runs on datasets by step."""
    figure, axes = _figure(2, 2)
    panels = {
        "greedy_acc": "Held-out greedy accuracy",
        "held_out_sft_loss": "Held-out loss of SFT, nats a token",
        "held_out_pair_accuracy": "Held-out pairs right",
        "held_out_pair_margin": "Held-out margin / its last value (in brackets)",
    }
    for axis, (key, title) in zip(axes.flat, panels.items(), strict=True):
        for index, name in enumerate(DATASETS):
            for number, record in enumerate(kept(name).values()):
                found = [e for e in record["evaluations"] if key in e]
                if not found:
                    continue
                if key == "held_out_pair_accuracy":
                    found = found[1:]  # at first both scores of a pair are equal
                values, label = [e[key] for e in found], name
                if key == "held_out_pair_margin":  # of unlike scales
                    label, values = f"{name} ({values[-1]:.3g})", [v / values[-1] for v in values]
                _line(axis, [e["step"] for e in found], values, index, "" if number else label)
        axis.set(title=title, xlabel="step", xlim=(-3, 103))
        axis.legend(frameon=False, fontsize=8, loc="lower right")
    axes[0, 0].set(ylim=(0, 1.03))
    axes[0, 1].set(yscale="log")
    axes[0, 1].get_legend().remove()
    axes[1, 0].set(ylim=(0.45, 1.03))
    axes[1, 0].legend(frameon=False, fontsize=8, loc="upper right")
    axes[1, 0].axhline(0.5, color="gray", lw=0.9, ls="--")
    axes[1, 0].text(0, 0.51, "a coin", color="gray", fontsize=8)
    _save(figure, path)


def draw_taught(path: Path) -> None:
    """Draw accuracy of student and teacher, and the KL between them, by step."""
    figure, axes = _figure(1, 2)
    for index, name in enumerate(TAUGHT):
        for number, record in enumerate(kept(name).values()):
            label, found = "" if number else name, record["evaluations"]
            values = [e["greedy_acc"] for e in found]
            _line(axes[0], [e["step"] for e in found], values, index, label)
            kl = record["steps"].get("reference_kl", [])
            smooth = [median(kl[max(0, i - 8) : i + 1]) for i in range(len(kl))]
            if kl:
                axes[1].plot(range(1, len(kl) + 1), smooth, color=f"C{index}", label=label, lw=1.2)
    teacher = json.loads((RECORDS / "teacher.json").read_text())["evaluations"]
    values = [e["greedy_acc"] for e in teacher]
    label = f"the teacher's own run ({values[-1]:.3f} at its end)"
    axes[0].plot([e["step"] for e in teacher], values, color="gray", lw=1, ls=":", label=label)
    axes[0].axhline(values[-1], color="gray", lw=0.8, ls="--")
    axes[0].set(title="Held-out greedy accuracy of the student", xlabel="step", ylim=(0.3, 1.02))
    axes[1].set(title="KL to the teacher, median of 9 steps", xlabel="step", yscale="log")
    axes[1].set(ylabel="nats a token")
    axes[0].legend(frameon=False, fontsize=8, loc="lower right")
    axes[1].legend(frameon=False, fontsize=8)
    _save(figure, path)


def _figure(rows: int, columns: int):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt.subplots(rows, columns, figsize=(4.8 * columns, 3.4 * rows))


def _line(axis, steps: list, values: list, index: int, label: str) -> None:
    axis.plot(steps, values, marker="o", ms=3, lw=1.3, color=f"C{index}", label=label)


def _save(figure, path: Path) -> None:
    for axis in figure.axes:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run the command `run`, `keep` or `draw`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("run", "keep", "draw"))
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--cores", default="0,1")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--only", default=",".join((*DATASETS, "distill", "distill_mixed")))
    a = parser.parse_args()
    if a.what == "draw":
        tables()
        draw_datasets(HERE / "datasets.png")
        draw_taught(HERE / "taught.png")
    elif not a.out:
        parser.error("OUT, please")
    elif a.what == "keep":
        keep(a.out)
    else:
        cores, seeds = ([int(n) for n in text.split(",")] for text in (a.cores, a.seeds))
        run(a.out, cores, seeds, a.only.split(","))


if __name__ == "__main__":
    main()
