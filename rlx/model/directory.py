"""Find an HF directory, read its `config.json`, check its tensors by their headers. No JAX."""

import dataclasses
import math
from pathlib import Path

from rlx.base import UserError, unknown
from rlx.model import hf_files
from rlx.model.config_forms import NotOurs, read_json
from rlx.model.model_config import ModelConfig, end_tokens
from rlx.model.tensors import open_tensors


def resolve(path: str, what: str = "model.path") -> Path:
    """Return the local directory of an HF directory or hub name; a hub name is downloaded once.

    `rlx:NAME` is a model that comes with the package, `rlx/assets/NAME`, or one that another
    package ships (`gguf_files.PACKAGES`), converted once.

    Args:
      what: the option that gave the path, for errors.

    Raises:
      UserError: it is neither.
    """
    if path.startswith("rlx:"):
        return _packaged(path.removeprefix("rlx:"))
    local = Path(path).expanduser()
    if local.is_dir():
        return local
    if local.exists() or path.count("/") != 1 or path.startswith((".", "/", "~")):
        raise UserError(f"{what}={path!r} is not a directory; give an HF directory or hub name")
    try:
        from huggingface_hub import snapshot_download

        patterns = ["*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt"]
        return Path(snapshot_download(path, allow_patterns=patterns))
    except Exception as error:  # the hub client raises its own, requests' and OS errors
        raise UserError(
            f"{what}={path!r} is neither a directory nor downloadable from the hub "
            f"({type(error).__name__}); check the name and the network, or give a directory that "
            "has it"
        ) from error


def _packaged(name: str) -> Path:
    from rlx.model import gguf_files  # it imports tokenizers, which takes a moment

    if name in gguf_files.PACKAGES:
        return gguf_files.packaged(name)
    assets = Path(__file__).parents[1] / "assets"
    if not (assets / name / "config.json").exists():
        names = [*(directory.name for directory in assets.iterdir()), *gguf_files.PACKAGES]
        raise unknown("packaged model", f"rlx:{name}", [f"rlx:{name}" for name in names])
    return assets / name


def load_config(path: str | Path) -> ModelConfig:
    """Return an HF directory's ModelConfig, `foreign` for a model that the decoder has not."""
    path = Path(path)
    record = read_json(path / "config.json")
    try:
        config = ModelConfig.from_hf(record)
    except NotOurs as error:
        numbers = 0
        if list(path.glob("*.safetensors")):
            with open_tensors(path) as tensors:
                numbers = sum(math.prod(tensors.shape(name)) for name in tensors)
        try:
            config = ModelConfig.from_foreign(record, str(error), numbers)
        except UserError as lack:
            raise UserError(f"{error}; trainer=torch may take it, but {lack}") from None
    generation = path / "generation_config.json"
    ends = end_tokens(read_json(generation)) if generation.exists() else ()
    merged = tuple(dict.fromkeys((*config.eos_token_ids, *ends)))
    return dataclasses.replace(config, eos_token_ids=merged)


def check(path: str | Path) -> ModelConfig:
    """Return the ModelConfig of an HF directory; reads only the headers of its tensors.

    What a foreign model's should be called transformers alone knows.

    Raises:
      UserError: naming the file or tensor that is missing, extra or mis-shaped.
    """
    config = load_config(path)
    with open_tensors(path) as tensors:
        if not config.foreign:
            hf_files.check_tensors(tensors, config)
    return config
