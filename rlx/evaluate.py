"""`python -m rlx.evaluate --config=FILE --datasets=gsm8k,math_500`: a model's scores, no trainer.

Prints and saves one row a data set. The same command again goes on where it stopped.
"""

import sys
from pathlib import Path

from rlx.cli import command, flags
from rlx.config import check
from rlx.doctor import failures

FLAGS = {
    "datasets": "names (gsm8k, math_500, math, train_amc_aime, aime24, amc23, arithmetic), .jsonl "
    "paths, or NAME=PATH, with commas between",
    "models": "HF directories, hub names or checkpoints, with commas between; default: model.path",
    "max_gen_tokens": "tokens of an answer; default: sampling.max_new_tokens",
    "n_samples": "sampled answers a question, besides the greedy one; default 32, 0: none",
    "temperature": "of the sampled answers; default 0.6",
    "top_p": "of the sampled answers; default 0.95",
    "pass_at": "k of the pass@k columns; default 8,16",
    "maj_at": "k of the maj@k columns; default: none",
    "workflow": "class of a workflow or an agent, package.module.Class or FILE.py:Class; default: "
    "one turn, graded",
    "workflow_kwargs": "of its constructor, a JSON object",
    "limit": "questions of each set; default: all",
    "output": "directory; default: runs/evaluation-MODEL",
}


def main() -> int:
    """Parses, asks, prints the table."""
    config, values = flags.parse(sys.argv, config_needed=True, switches=None, **FLAGS)
    from rlx.agents import loading

    if values.workflow:  # told of before what takes seconds to import
        loading.kind(loading.load_class(values.workflow))
    from rlx.evaluation import evaluations
    from rlx.evaluation.scores import text_table
    from rlx.observe.progress_bar import ProgressBar

    ks = {
        name: tuple(flags.number(values, name, lambda t: [*map(int, t.split(","))], default))
        for name, default in (("pass_at", (8, 16)), ("maj_at", ()))
    }
    n_samples = flags.number(values, "n_samples", int, 32)
    options = evaluations.Options(
        n_samples=n_samples,
        temperature=flags.number(values, "temperature", float, 0.6),
        top_p=flags.number(values, "top_p", float, 0.95),
        pass_at=ks["pass_at"] if n_samples else (),
        maj_at=ks["maj_at"] if n_samples else (),
        limit=flags.number(values, "limit", int, 0),
        workflow=values.workflow,
        workflow_kwargs=loading.parse_kwargs(values.workflow_kwargs),
    )
    with config.unlocked():
        config.sampling.max_new_tokens = flags.number(
            values, "max_gen_tokens", int, config.sampling.max_new_tokens
        )
        config.eval.max_new_tokens = 0
    check(config, trains=False)
    sets = evaluations.question_sets(
        values.datasets or "gsm8k", config.reward.name, options.limit, config.data.question_key
    )
    models = evaluations.named((values.models or config.model.path).split(","))
    out = Path(values.output or f"runs/evaluation-{'-'.join(models)}")
    with ProgressBar() as bar:
        rows = evaluations.run(config, models, sets, options, out, bar.show)
    command.say(text_table(rows, options.columns))
    for line in evaluations.shortfall(rows, out):
        command.say(line)
    return 0


if __name__ == "__main__":
    command.run(main, explain=failures.explain)
