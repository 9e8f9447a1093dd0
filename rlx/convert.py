"""`python -m rlx.convert SOURCE TARGET`: orbax checkpoint → HF directory, or back.

The direction follows from SOURCE. A checkpoint is DIR/step_*, or the directory that holds several
(a run's WORKDIR/checkpoints, or WORKDIR itself); then the newest complete one is read. A LoRA run's
checkpoint holds only adapters. They are merged into the model that the run began with
(--model, or the one that the checkpoint names); --adapter=DIR also writes a PEFT directory. An HF
directory has a config.json; TARGET gets one checkpoint of its parameters. TARGET must not exist.
--gguf=FILE --hf=DIR makes an HF directory of a GGUF file, without SOURCE and TARGET.
"""

from pathlib import Path

from rlx.base import UserError
from rlx.cli import command
from rlx.doctor import failures
from rlx.model import gguf_files


def main() -> None:
    """Convert SOURCE to TARGET and print both."""
    parser = command.Parser("rlx.convert", description=__doc__, allow_abbrev=False)
    parser.add_argument("source", nargs="?", help="checkpoint, HF directory or hub name")
    parser.add_argument("target", nargs="?", type=Path, help="directory to make")
    parser.add_argument("--gguf", type=Path, help="GGUF file, in place of SOURCE")
    parser.add_argument("--hf", type=Path, help="HF directory to make of it, in place of TARGET")
    parser.add_argument("--model", default="", help="HF directory with the config and tokenizer")
    parser.add_argument("--adapter", type=Path, help="PEFT directory to make; of a LoRA run")
    parser.add_argument("--dtype", default="", choices=("", "float32", "bfloat16"))
    a = parser.parse_args()
    for name, output in (("TARGET", a.target), ("--hf", a.hf), ("--adapter", a.adapter)):
        if output and output.exists():
            raise UserError(f"{output} exists; remove it or give another {name}")
    if a.gguf and a.hf and not (a.source or a.model or a.adapter):
        command.say(gguf_files.convert(a.gguf, a.hf, a.dtype))
        return
    if a.gguf or a.hf or not a.target:
        raise UserError("give SOURCE and TARGET, or --gguf=FILE and --hf=DIR and at most --dtype")
    from rlx.model import hf
    from rlx.run import export
    from rlx.train import checkpoint

    path = checkpoint.find(a.source)
    if path:
        command.say(export.checkpoint_to_hf(path, a.target, a.model, a.dtype, a.adapter))
    elif a.adapter or a.model:
        flag = "--adapter" if a.adapter else "--model"
        raise UserError(f"{a.source} is no checkpoint, so {flag} has no use; drop it")
    else:
        command.say(export.hf_to_checkpoint(hf.resolve(a.source, "SOURCE"), a.target, a.dtype))


if __name__ == "__main__":
    command.run(main, explain=failures.explain)
