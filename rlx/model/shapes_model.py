"""Make the model `rlx:shapes`, which sees pictures: an Idefics3 of 0.3M random parameters.

Its tokens are the words of the questions and answers of `rollout/shapes.py`, as a test checks. A
picture of 32 × 32 pixels has 4 patches, each of which becomes one token.
"""

from pathlib import Path
from typing import Any

from rlx.base import packages_of
from rlx.system.atomic_directory import atomic_directory

VERSION = 1  # of what `write` makes; raising it renews the caches
_SPECIAL = {
    "pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>", "image_token": "<image>",
    "fake_image_token": "<fake_token_around_image>", "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
}  # fmt: skip
_WORDS = (
    "system user assistant tool : ? 0 1 2 3 4 how many what colour is the where red green blue "
    "yellow shape circle square triangle shapes circles squares triangles top bottom left right"
)
# Each message in a line, that of the assistant up to <eos>.
_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: "
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}"
    "{{ '<eos>' if message.role == 'assistant' else '' }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_PIXELS, _PATCH = 32, 16
_WIDTH, _TOWER = 64, 128  # of the language model, of the tower: shapes need more than words
_SPREAD = 0.5  # standard deviation of random embeddings, of words and of places


def write(target: Path) -> None:
    """Write an HF directory; UserError names a package that is missing."""
    with packages_of("torch,vision", "rlx:shapes needs packages"):
        import torch
        import transformers
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers.models.idefics3 import image_processing_pil_idefics3 as pil
    tokens = [*_SPECIAL.values(), *_WORDS.split()]
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(tokens)}, _SPECIAL["unk_token"]))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    specials = dict(list(_SPECIAL.items())[:3])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, **specials, additional_special_tokens=tokens[3 : len(_SPECIAL)]
    )
    size = {"longest_edge": _PIXELS}
    images = pil.Idefics3ImageProcessorPil(do_image_splitting=False, size=size, max_image_size=size)
    patches = (_PIXELS // _PATCH) ** 2
    processor = transformers.Idefics3Processor(
        images, tokenizer, image_seq_len=patches, chat_template=_TEMPLATE
    )
    text = {
        "hidden_size": _WIDTH, "intermediate_size": 2 * _WIDTH, "num_hidden_layers": 2,
        "model_type": "llama", "vocab_size": len(tokens),
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
    }  # fmt: skip
    vision = {
        "hidden_size": _TOWER, "intermediate_size": 2 * _TOWER, "num_hidden_layers": 1,
        "num_attention_heads": 4, "image_size": _PIXELS, "patch_size": _PATCH,
    }  # fmt: skip
    options: dict[str, Any] = {"pad_token_id": 0, "tie_word_embeddings": False, "scale_factor": 1}
    config = transformers.Idefics3Config(
        text_config=text, vision_config=vision, image_token_id=tokens.index("<image>"), **options
    )
    model = transformers.Idefics3ForConditionalGeneration(config)
    source = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim > 1:  # the usual 0.02 is small for a width of 64, which then learns slowly
                spread = _SPREAD if "embed_tokens" in name or "position" in name else 0.0
                p.normal_(0, spread or p[0].numel() ** -0.5, generator=source)
    model.generation_config.eos_token_id = tokens.index("<eos>")
    with atomic_directory(target) as fresh:
        model.save_pretrained(fresh)
        processor.save_pretrained(fresh)
