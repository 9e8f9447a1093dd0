"""Load a model's tokenizer and check its chat template."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from rlx.base import UserError, explained
from rlx.cli.user_code import words
from rlx.rollout import arithmetic, data
from rlx.rollout.control_tokens import RAW
from rlx.rollout.workflows import encode, render

QUESTION = "What is 12 + 30?"  # for the check of a chat template


def _template(given: str, tokenizer: Any) -> str:
    """Return the chat template in a file, or for "none" one that renders the raw texts."""
    if given == "none":
        # Raw prompts begin with the token that the tokenizer puts before every text.
        begins = tokenizer.bos_token_id in tokenizer("a")["input_ids"][:1]
        return "{{ bos_token }}" * begins + RAW
    remedy = "give a Jinja file, or none for raw prompts"
    with explained(f"cannot read data.chat_template={given}", remedy):
        return Path(given).read_text()


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
        raise UserError(
            f"the tokenizer in {model_dir} cannot be read ({words(error)}); replace its files"
        ) from error
    if chat_template:  # a file, or "none" for raw prompts
        tokenizer.chat_template = _template(chat_template, tokenizer)
    if not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer in {model_dir} has no chat template; use an instruct model, or set "
            "data.chat_template to none (raw prompts) or to a file"
        )
    place = f"data.chat_template={chat_template}" if chat_template else f"of {model_dir}"
    what, why = f"the chat template ({place})", "use an instruct model's, or correct it"
    try:
        text = render(tokenizer, QUESTION, system_prompt)
    except Exception as error:  # from Jinja, or raised by the template
        with suppress(Exception):
            if system_prompt and render(tokenizer, QUESTION):
                why = "it accepts no system message; leave data.system_prompt empty"
        raise UserError(f"{what} fails ({words(error)}); {why}") from error
    if QUESTION not in text:
        raise UserError(f"{what} drops the question from the prompt; {why}")
    return tokenizer


def read_prompts(path: str, tokenizer: Any, count: int) -> list[np.ndarray]:
    """Return up to `count` prompts, [T] int32 each, rendered by the chat template."""
    if not path:
        rows = arithmetic.problems(0, "held_out", count)
    elif path.lower().endswith(data.FORMATS):  # rows with `question`
        rows = data.load(path, answer_key="")[:count]
    else:
        with explained(f"cannot read prompts from {path}", "give a text file"):
            lines = Path(path).read_text().splitlines()  # a prompt in each
        rows = [{"question": line} for line in lines if line.strip()][:count]
    if not rows:
        raise UserError(f"{path} has no prompts; give rows with `question`, or lines of text")
    texts = [render(tokenizer, row["question"]) for row in rows]
    return [np.array(encode(tokenizer, text), np.int32) for text in texts]
