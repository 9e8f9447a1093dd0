"""`python -m rlx.evaluate --config=FILE --datasets=gsm8k,math_500`: a model's scores, no trainer.

Prints and saves one row a data set. The same command again goes on where it stopped.
"""

import sys
from pathlib import Path

from rlx.cli import command
from rlx.config import check
from rlx.doctor import failures
from rlx.run import flags

FLAGS = {
    "datasets": "names (gsm8k, math_500, math, train_amc_aime, aime24, amc23, arithmetic, shapes), "
    "names of environments as in rollout.workflow, files or NAME=PATH; with commas between",
    "models": "HF directories, hub names or checkpoints, with commas between; default: model.path",
    "max_gen_tokens": "tokens of an answer; default: sampling.max_new_tokens",
    "n_samples": "sampled answers a question, besides the greedy one; default 32, 0: none",
    "temperature": "of the sampled answers; default 0.6",
    "top_p": "of the sampled answers; default 0.95",
    "pass_at": "k of the pass@k columns; default 8,16",
    "maj_at": "k of the maj@k columns; default: none",
    "workflow": "class of a workflow or an agent, FILE.py:Class or module:Class; default: "
    "rollout.workflow",
    "workflow_kwargs": "of its constructor, a JSON object; default: rollout.workflow_kwargs",
    "limit": "questions of each set; default: all",
    "output": "directory; default: runs/evaluation-MODEL",
}


def main() -> int:
    """Parse the command line, ask the questions, print the table."""
    config, values = flags.parse(sys.argv, config_needed=True, switches={}, **FLAGS)
    from rlx.agents import named_workflow

    # A mistake in it is reported before what takes seconds to import.
    named_workflow.uses_rewards(values.workflow or config.rollout.workflow)
    from rlx.evaluation import question_sets, sample_files, statistics
    from rlx.observe.progress import ProgressBar
    from rlx.run import allocate, export, score_models

    options = score_models.eval_options(config, values)
    config = allocate.apply_allocation(config, trains=False)
    check(config, trains=False)
    limit = flags.number(values, "limit", int, 0)
    reward, keys = config.reward.name, (config.data.question_key, config.data.answer_key)
    sets = question_sets.load_sets(values.datasets or "gsm8k", reward, limit, *keys, options.images)
    models = export.named_models((values.models or config.model.path).split(","))
    out = Path(values.output or f"runs/evaluation-{'-'.join(models)}")
    with ProgressBar() as bar:
        table = score_models.score_models(config, models, sets, options, out, bar.show)
    command.say(statistics.text_table(table, options.columns))
    for line in sample_files.shortfall(table, out):
        command.say(line)
    return 0


if __name__ == "__main__":
    command.run(main, explain=failures.explain)
