"""Write the model card of a run's exported weights, as the Hugging Face hub reads it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlx import __version__
from rlx.cli.text import number
from rlx.observe.run_table import held_out, summary
from rlx.observe.rundir import finite
from rlx.system.jsonl import has_step, read_json, read_jsonl

_POINTS = 12  # evaluations in the table


def card(
    workdir: Path, name: str, license_name: str, defaults: Mapping[str, Any], step: int | None
) -> str:
    """Return the card of model `name`: metadata, base, how it was trained, held-out results.

    Its weights are those of `step`; None: of the last one.
    """
    from huggingface_hub import EvalResult, ModelCardData  # takes a moment to import

    row, config = summary(workdir, defaults), read_json(workdir / "config.json")
    base = str(config.get("model", {}).get("path", ""))
    on_hub = base.count("/") == 1 and base[0] not in "./~" and not Path(base).exists()
    evals, done = filter(has_step, read_jsonl(workdir / "eval.jsonl")), step or row["step"]
    _, metric, scores = held_out([e for e in evals if e["step"] <= done])
    results = None
    if scores:
        last = finite(scores[-1][0])
        results = [EvalResult("text-generation", "held-out", "held-out questions", metric, last)]
    data = ModelCardData(
        model_name=name, license=license_name or None, base_model=base if on_hub else None,
        library_name="transformers", pipeline_tag="text-generation", eval_results=results,
        tags=["rlx", "reinforcement-learning"],
    )  # fmt: skip
    settings = {"config": row["config"], "seed": row["seed"], **row["changed"]}
    parts = [
        f"---\n{data.to_yaml()}\n---\n\n# {name}",
        f"`{base}` after {done} of {row['total']} steps of rlx {__version__}.",
        _table(
            ("setting", "value"),
            [(f"`{k}`", f"`{v}`") for k, v in settings.items() if v not in (None, "")],
        ),
    ]
    if scores:
        shown = scores[:: -(-len(scores) // _POINTS)]
        shown += scores[-1:] * (shown[-1] != scores[-1])
        rows = [(str(step), number(value)) for value, step in shown]
        parts.append(f"Held-out questions:\n\n{_table(('step', metric), rows)}")
    return "\n\n".join(parts) + "\n"


def _table(head: tuple[str, str], rows: list[tuple[str, str]]) -> str:
    lines = [head, ("---",) * 2, *((a, b.replace("|", "\\|")) for a, b in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
