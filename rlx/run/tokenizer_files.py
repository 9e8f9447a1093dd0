"""Load a model's tokenizer and check its chat template."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from rlx.base import PromptTokens, UserError, explained
from rlx.cli.user_code import words
from rlx.rollout import arithmetic, data
from rlx.rollout.control_tokens import RAW
from rlx.rollout.images import ImagePrompts, RowImages
from rlx.rollout.workflows import Prompts, render
from rlx.system.image_store import ImageStore

QUESTION = "What is 12 + 30?"  # for the check of a chat template


def load_tokenizer(model_dir: Path, system_prompt: str = "", chat_template: str = "") -> Any:
    """Return the directory's tokenizer, whose chat template renders a question; or UserError."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers import AutoTokenizer

    if not any((model_dir / name).exists() for name in ("tokenizer.json", "vocab.json")):
        raise UserError(f"no tokenizer.json in {model_dir}; copy the model's tokenizer files there")
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_dir, trust_remote_code=False)
    except Exception as error:  # broken files raise errors of any type
        what = f"the tokenizer in {model_dir} cannot be read ({words(error)})"
        raise UserError(f"{what}; replace its files") from error
    if chat_template == "none":  # raw texts, after the token that the tokenizer puts before all
        begins = tokenizer.bos_token_id in tokenizer("a")["input_ids"][:1]
        tokenizer.chat_template = "{{ bos_token }}" * begins + RAW
    elif chat_template:
        remedy = "give a Jinja file, or none for raw prompts"
        with explained(f"cannot read data.chat_template={chat_template}", remedy):
            tokenizer.chat_template = Path(chat_template).read_text("utf-8-sig")
    if not tokenizer.chat_template:
        remedy = "use an instruct model, or set data.chat_template to none (raw prompts) or a file"
        raise UserError(f"the tokenizer in {model_dir} has no chat template; {remedy}")
    place = f"data.chat_template={chat_template}" if chat_template else f"of {model_dir}"
    what, remedy = f"the chat template ({place})", "use an instruct model's, or correct it"
    try:
        text = render(tokenizer, QUESTION, system_prompt)
    except Exception as error:  # from Jinja, or raised by the template
        with suppress(Exception):
            if system_prompt and render(tokenizer, QUESTION):
                remedy = "it accepts no system message; leave data.system_prompt empty"
        raise UserError(f"{what} fails ({words(error)}); {remedy}") from error
    if QUESTION not in text:
        raise UserError(f"{what} drops the question from the prompt; {remedy}")
    return tokenizer


def image_prompts(model_dir: Path, tokenizer: Any, store: ImageStore) -> ImagePrompts | None:
    """Return what expands the images of prompts; None if the model takes none, or UserError."""
    path = model_dir / "config.json"
    takes = path.exists() and "vision_config" in json.loads(path.read_text())
    return ImagePrompts(model_dir, tokenizer, store) if takes else None


class Served(NamedTuple):
    """The parts of a model that a gateway needs."""

    tokenizer: Any
    images: ImagePrompts | None
    store: ImageStore  # of the images that clients send

    @classmethod
    def load(cls, model_dir: Path, chat_template: str) -> "Served":
        """Return the parts in an HF directory; or UserError."""
        tokenizer, store = load_tokenizer(model_dir, chat_template=chat_template), ImageStore()
        return cls(tokenizer, image_prompts(model_dir, tokenizer, store), store)


def read_prompts(path: str, model_dir: Path, count: int, store: ImageStore) -> list[PromptTokens]:
    """Return up to `count` prompts, rendered by the model's chat template; keep their images."""
    if not path:
        rows = arithmetic.problems(0, "held_out", count)
    elif path.lower().endswith(data.FORMATS):  # rows with `question`
        rows = data.load(path, answer_key="", most=count, images=RowImages(store, "images"))
    else:
        with explained(f"cannot read prompts from {path}", "give a text file"):
            lines = Path(path).read_text("utf-8-sig").splitlines()  # a prompt in each
        rows = [{"question": line} for line in lines if line.strip()][:count]
    if not rows:
        raise UserError(f"{path} has no prompts; give rows with `question`, or lines of text")
    tokenizer = load_tokenizer(model_dir)
    prompts = Prompts(tokenizer, images=image_prompts(model_dir, tokenizer, store))
    return [prompts.ids(row) for row in rows]
