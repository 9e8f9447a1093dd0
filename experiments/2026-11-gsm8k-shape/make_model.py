"""Write an HF directory of Qwen2.5-0.5B's shape with random weights and a new tokenizer.

    python experiments/2026-11-gsm8k-shape/make_model.py DIR --text=train.jsonl

24 layers, 896 wide, vocabulary 151,936, tied: 494M parameters, 1 GB in bfloat16. The tokenizer is a
byte-level BPE trained on the text. Its ids are the first few thousand of the vocabulary.
"""

import argparse
import json
from pathlib import Path

import jax
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rlx.model import hf, params
from rlx.model.model_config import ModelConfig

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 151_936,
    "num_hidden_layers": 24,
    "hidden_size": 896,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE with ChatML's tokens, of up to 8,000 tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=8000, special_tokens=SPECIAL, initial_alphabet=alphabet),
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        unk_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
    )
    fast.chat_template = TEMPLATE
    return fast


def main() -> None:
    """Write the directory."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="a .jsonl to train the BPE on")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    lines = arguments.text.read_text().splitlines()
    config = ModelConfig.from_hf(CONFIG)
    weights = params.init(config, jax.random.key(arguments.seed), "bfloat16")
    hf.save(arguments.directory, config, weights, "bfloat16")
    texts = [value for line in lines for value in json.loads(line).values()]
    tokenizer(texts).save_pretrained(arguments.directory)


if __name__ == "__main__":
    main()
