"""Write `rlx:arithmetic` with a chat template for tools, as the start of SFT.

    python experiments/2026-11-tools/make_model.py DIR

The tokenizer gets a token for each fixed text of a call; their embeddings are random.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
from tokenizers import AddedToken
from transformers import AutoTokenizer

from rlx.model import hf
from rlx.model.directory import resolve

CALL = '{"name": "%s", "arguments": {"expression": "%s"}}'
TOKENS = (
    "<tools>", "</tools>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
    "calculator", "expression", '{"name": "', '", "arguments": {"', '": "', '"}}',
)  # fmt: skip
TEMPLATE = r"""
{%- if tools -%}
{{ '<|im_start|>system\n<tools>' }}
{%- for tool in tools -%}
{%- set function = tool.function or tool -%}
{{ function.name + '(' + (function.parameters.properties or {}) | join(', ') + ')' }}
{%- if not loop.last -%}{{ '\n' }}{%- endif -%}
{%- endfor -%}
{{ '</tools><|im_end|>\n' }}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{ '<|im_start|>user\n<tool_response>' + message.content + '</tool_response>' }}
{%- else -%}
{{ '<|im_start|>' + message.role + '\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call -%}
{{ '<tool_call>{"name": "' + function.name + '", "arguments": ' }}
{{- function.arguments if function.arguments is string else function.arguments | tojson -}}
{{ '}</tool_call>' }}
{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\n' }}
{%- endif -%}
""".strip()


def tokenizer():
    """Return the embedded tokenizer with TOKENS and the chat template."""
    found = AutoTokenizer.from_pretrained(resolve("rlx:arithmetic"))
    found.add_tokens([AddedToken(text, normalized=False) for text in TOKENS])
    found.chat_template = TEMPLATE
    return found


def longer(params, config, vocab_size):
    """Return parameters and config with random embeddings for the new tokens."""
    new = (vocab_size - config.vocab_size, config.model_dim)
    noise = config.initializer_range * jax.random.normal(jax.random.key(0), new)
    embed = jnp.concatenate([params["embed"], noise])
    return {**params, "embed": embed}, replace(config, vocab_size=vocab_size)


def main() -> None:
    """Write the directory."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    own = tokenizer()
    config, params = hf.load(resolve("rlx:arithmetic"))
    params, config = longer(params, config, len(own))
    hf.save(arguments.directory, config, params)
    own.save_pretrained(arguments.directory)
    # The end token, and the tokenizer class's name in transformers 4 (vLLM's).
    for name in ("generation_config.json", "tokenizer_config.json"):
        text = (resolve("rlx:arithmetic") / name).read_text()
        (arguments.directory / name).write_text(text)


if __name__ == "__main__":
    main()
