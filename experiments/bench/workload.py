"""The end-to-end workload: a random 3.7M-parameter Qwen2, 8 prompts x 8 samples x 64 new tokens.

With a model's path it is that model, with word problems in its own chat template. Both sides of the
benchmark use the same directory (model, tokenizer, prompts) and reward. The minimum and maximum of
new tokens are equal, so both generate the same amount.
"""

import json
from pathlib import Path

import numpy as np

PROMPTS, SAMPLES, NEW_TOKENS, PROMPT_WORDS = 8, 8, 64, 10
VOCAB = 2048
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": VOCAB,
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 768,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "dtype": "float32",
}
TEMPLATE = (
    "{% for m in messages %}{{ '<start> ' + m['content'] + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<answer>' }}{% endif %}"
)


def reward(prompt="", completion="", prompt_ids=(), completion_ids=(), **row) -> float:
    """Return the share of even token ids: a cheap, dense and learnable reward."""
    ids = np.asarray(completion_ids)
    return float((ids % 2 == 0).mean()) if ids.size else 0.0


def make(directory: Path, model: str = "") -> Path:
    """Write (or link) model, tokenizer and prompts.jsonl into `directory`; return it."""
    directory.mkdir(parents=True, exist_ok=True)
    if model:
        from configs.data import word_problems
        from rlx.model.directory import resolve

        (directory / "model").symlink_to(Path(resolve(model)).resolve())
        questions = [row["question"] for row in word_problems.problems(0, "train", 2000)]
    else:
        questions = _random(directory / "model")
    with open(directory / "prompts.jsonl", "w") as file:
        file.writelines(json.dumps({"question": q, "answer": "0"}) + "\n" for q in questions)
    return directory


def _random(directory: Path) -> list[str]:
    """Write the random model and its tokenizer; return prompts of its words."""
    import jax
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from rlx.model import hf, params
    from rlx.model.model_config import ModelConfig

    rng = np.random.default_rng(0)
    corpus = ["".join(rng.choice(list("abcdefghijklmnop"), 4)) for _ in range(20_000)]
    # Byte-level BPE: transformers loads each Qwen2 directory with Qwen2's own tokenizer class.
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<eos>", "<pad>", "<start>", "<answer>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=special,
        initial_alphabet=tokenizer.pre_tokenizer.alphabet(),
    )
    tokenizer.train_from_iterator([" ".join(corpus)], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<|endoftext|>", eos_token="<eos>", pad_token="<pad>"
    )
    fast.chat_template = TEMPLATE
    config = ModelConfig.from_hf(CONFIG)
    hf.save(directory, config, params.init(config, jax.random.key(0), "float32"), "float32")
    fast.save_pretrained(directory)
    return [" ".join(rng.choice(corpus, PROMPT_WORDS)) for _ in range(2000)]


def get_config(directory: str):
    """Return rlx's config: `--config=experiments/bench/workload.py:DIR`."""
    from rlx.config import default

    c = default()
    c.model.path = f"{directory}/model"
    c.data.train = f"{directory}/prompts.jsonl"
    c.data.max_prompt_tokens = 32
    c.reward.name = "experiments.bench.workload:reward"
    c.sampling.n_samples = SAMPLES
    c.sampling.max_new_tokens = c.sampling.min_new_tokens = NEW_TOKENS
    c.rollout.batch_prompts = PROMPTS
    c.rollout.max_staleness = 2
    c.rollout.max_concurrent_rollouts = 2 * PROMPTS
    c.train.max_tokens_per_microbatch = 1536
    c.train.row_buckets = (96,)  # prompts of at most 32 tokens and 64 new ones
    c.optimizer.learning_rate = 1e-4
    c.fleet.slots = 64
    c.eval.num_questions = 0
    c.total_steps = 30
    return c
