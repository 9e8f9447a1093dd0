"""`python -m rlx.convert SOURCE TARGET`: orbax checkpoint → HF directory, or back.

The direction follows from SOURCE. A checkpoint is DIR/step_*, or the directory that holds several
(a run's WORKDIR/checkpoints, or WORKDIR itself): the newest whole one. An HF directory has a
config.json; from it TARGET becomes a directory with one checkpoint that holds the parameters. To
train an HF directory, give it to a run as model.path instead. TARGET must not exist.
"""

import argparse
from pathlib import Path

from rlx import command
from rlx.base import UserError


def to_hf(path: Path, target: Path, model: str, dtype: str) -> str:
    """Writes the HF directory of a checkpoint's parameters; returns what was done."""
    from rlx.model import hf, params
    from rlx.model.config import ModelConfig
    from rlx.train import checkpoint

    host = checkpoint.read_host(path)
    model = model or host.get("config", {}).get("model", {}).get("path", "")
    directory = hf.resolve(model, "--model") if model else None
    if "model" in host:
        config = ModelConfig.from_hf(host["model"])
    elif directory:
        config = hf.load_config(directory)
    else:
        raise UserError(f"{path} does not say which model it is of; give --model=HF_DIRECTORY")
    part = {"params": params.shapes(config, checkpoint.dtype_of(path, "params.embed"))}
    restored = checkpoint.restore_part(path, part)["params"]
    hf.save(target, config, restored, dtype or None, source=directory)
    return f"{path} -> {target} (HF)"


def from_hf(source: Path, target: Path, dtype: str) -> str:
    """Writes a checkpoint with an HF directory's parameters; returns what was done."""
    from rlx.model import hf
    from rlx.train import checkpoint

    config, loaded = hf.load(source, dtype or None)
    host = {"model": config.to_hf(), "config": {"model": {"path": str(source.absolute())}}}
    with hf.replaced_directory(target) as fresh:
        saved = checkpoint.save(fresh, 0, {"params": loaded}, host)
    return f"{source} -> {target / saved.name} (orbax)"


def main() -> None:
    """Converts once and prints what from and to what."""
    parser = argparse.ArgumentParser("rlx.convert", description=__doc__, allow_abbrev=False)
    parser.add_argument("source", help="checkpoint, HF directory or hub name")
    parser.add_argument("target", type=Path, help="directory to make")
    parser.add_argument("--model", default="", help="HF directory with the config and tokenizer")
    parser.add_argument("--dtype", default="", choices=("", "float32", "bfloat16"))
    a = parser.parse_args()
    if a.target.exists():
        raise UserError(f"{a.target} exists; remove it or give another TARGET")
    from rlx.model import hf
    from rlx.train import checkpoint

    if path := checkpoint.find(a.source):
        print(to_hf(path, a.target, a.model, a.dtype), flush=True)
        return
    if Path(a.source).is_dir() and not (Path(a.source) / "config.json").exists():
        raise UserError(
            f"{a.source} holds neither an HF config.json nor a checkpoint step_*; give one of them"
        )
    print(from_hf(hf.resolve(a.source, "SOURCE"), a.target, a.dtype), flush=True)


if __name__ == "__main__":
    command.run(main)
