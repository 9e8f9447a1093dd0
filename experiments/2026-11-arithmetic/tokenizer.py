"""The embedded model's tokenizer: bytes, so that it reads any text, and ChatML's tokens."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT, START, END = SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BOXED = "\\boxed{"
ROLES = ("system", "user", "assistant")

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""


def build() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE with merges for the roles only; each digit is one token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(role[:end], role[end]) for role in ROLES for end in range(1, len(role))]
    vocabulary = [*alphabet, *dict.fromkeys(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate(vocabulary)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(BOXED, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )
