"""`python -m rlx.convert SOURCE TARGET`: orbax checkpoint → HF directory, or back.

The direction follows from SOURCE. A checkpoint is DIR/step_*, or the directory that holds several
(a run's WORKDIR/checkpoints, or WORKDIR itself): the newest whole one. One of a LoRA run holds
adapters alone: they are merged into the model that the run began with (--model, or the one that
the checkpoint names), and --adapter=DIR writes them as a PEFT directory too. An HF directory has a
config.json; from it TARGET becomes a directory with one checkpoint that holds the parameters. To
train an HF directory, give it to a run as model.path instead. TARGET must not exist.

--trainer=torch or jax makes, of a checkpoint of the other trainer, TARGET with one of this one, all
of its state: a run whose checkpoints TARGET are goes on from it.
"""

import argparse
from pathlib import Path

from rlx.base import UserError
from rlx.cli import command
from rlx.doctor import failures


def main() -> None:
    """Convert SOURCE to TARGET and print both."""
    parser = argparse.ArgumentParser("rlx.convert", description=__doc__, allow_abbrev=False)
    parser.add_argument("source", help="checkpoint, HF directory or hub name")
    parser.add_argument("target", type=Path, help="directory to make")
    parser.add_argument("--model", default="", help="HF directory with the config and tokenizer")
    parser.add_argument("--adapter", type=Path, help="PEFT directory to make; of a LoRA run")
    parser.add_argument("--dtype", default="", choices=("", "float32", "bfloat16"))
    parser.add_argument("--trainer", default="", choices=("", "jax", "torch"))
    a = parser.parse_args()
    for made in filter(None, (a.target, a.adapter)):
        if made.exists():
            name = "TARGET" if made is a.target else "--adapter"
            raise UserError(f"{made} exists; remove it or give another {name}")
    from rlx.model import hf
    from rlx.run import export, trainer_switch
    from rlx.train import checkpoint

    path = checkpoint.find(a.source)
    if a.trainer:
        if not path or a.adapter or a.dtype or a.model:
            raise UserError("--trainer is for a whole checkpoint step_*; drop the other flags")
        made = trainer_switch.rewrite(path, a.target, a.trainer)
        command.say(f"{path} -> {made} (trainer={a.trainer})")
        return
    if path:
        command.say(export.checkpoint_to_hf(path, a.target, a.model, a.dtype, a.adapter))
        return
    if Path(a.source).is_dir() and not (Path(a.source) / "config.json").exists():
        raise UserError(
            f"{a.source} holds neither an HF config.json nor a checkpoint step_*; give one of them"
        )
    if a.adapter:
        raise UserError(f"{a.source} is no checkpoint of a LoRA run; drop --adapter")
    command.say(export.hf_to_checkpoint(hf.resolve(a.source, "SOURCE"), a.target, a.dtype))


if __name__ == "__main__":
    command.run(main, explain=failures.explain)
