"""Make the model that comes with rlx by supervised training on synthetic demonstrations.

    python experiments/2026-11-arithmetic/sft.py [--out=DIR]

Writes an HF directory (default: `rlx/assets/arithmetic`). Problems come from the training split,
and completions from `demonstrations.py`. Everything is drawn from `--seed`, so the command
gives the same weights again on the same machine.

Every other example is a lesson: a careful solution whose loss accepts both a colon and giving up.
Lessons practise the steps at which most solvers give up, without teaching patience.

Progress is measured on held-out problems without decoding. Greedy decoding writes the careful
solution exactly if each of its tokens is the most probable one there.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import demonstrations
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizer as tokenizers

import rlx
from rlx.model import decoder, hf
from rlx.model import params as parameters
from rlx.model.model_config import ModelConfig
from rlx.rollout import arithmetic

PACKAGED = Path(rlx.__file__).parent / "assets" / "arithmetic"
ROWS, ROW_LENGTH = 16, 192  # the longest prompt and completion have 190 tokens
IGNORED, TRAINED, EITHER = 0, 1, 2  # the kind of loss of a token
Example = tuple[list[int], list[int]]  # token ids, and the kind of each


def model_config(tokenizer) -> ModelConfig:
    """Return the config of a Qwen2 with 0.8M parameters."""
    end_of_text, _, end = tokenizer.convert_tokens_to_ids(list(tokenizers.SPECIAL))
    return ModelConfig(
        architecture="Qwen2ForCausalLM",
        vocab_size=len(tokenizer),
        num_layers=4,
        model_dim=128,
        mlp_dim=384,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        tie_embeddings=True,
        attention_bias=True,
        max_position=512,
        eos_token_ids=(end, end_of_text),
        pad_token_id=end_of_text,
    )


def encode(tokenizer, question: str, completion: str, lesson: bool = False) -> Example:
    """Return the token ids of one problem's chat, and the kind of loss of each token."""
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    ids = [*tokenizer.encode(completion), tokenizer.eos_token_id]
    carry_on = tokenizer.convert_tokens_to_ids(":")
    kinds = [EITHER if lesson and i == carry_on else TRAINED for i in ids]
    return [*prompt, *ids], [IGNORED] * len(prompt) + kinds


def examples(tokenizer, seed: int) -> Iterator[Example]:
    """Yield training problems without end: a demonstration, a lesson, a demonstration, …"""
    rng = random.Random(seed)
    stream = (row["question"] for row in arithmetic.stream(seed, "train"))
    for question, other in zip(stream, stream, strict=False):
        yield encode(tokenizer, question, demonstrations.draw(question, rng))
        yield encode(tokenizer, other, arithmetic.careful_solution(other), lesson=True)


def packed(source: Iterator[Example], rows: int = ROWS) -> dict[str, np.ndarray] | None:
    """Pack examples in order into [rows, ROW_LENGTH] arrays; return None when none are left.

    The example that does not fit is dropped; the source has no end.
    """
    batch = {
        name: np.zeros((rows, ROW_LENGTH), np.int32)
        for name in ("tokens", "positions", "segment_ids", "kinds")
    }
    row = start = segment = 0
    for ids, kinds in source:
        if start + len(ids) > ROW_LENGTH:
            row, start, segment = row + 1, 0, 0
        if row == rows:
            break
        segment += 1
        place = np.s_[row, start : start + len(ids)]
        batch["tokens"][place] = ids
        batch["positions"][place] = np.arange(len(ids))
        batch["segment_ids"][place] = segment
        batch["kinds"][place] = kinds
        start += len(ids)
    return batch if batch["segment_ids"].any() else None


def forward(params, config: ModelConfig, batch) -> jax.Array:
    """Return logits [rows, ROW_LENGTH − 1, vocabulary] of the tokens from the second on."""
    return decoder.unembed(params, config, decoder.states(params, config, batch)[0][:, :-1])


def make_loss(config: ModelConfig, give_up: int):
    """Return loss(params, batch): mean negative log-likelihood of completion tokens, nats.

    Args:
      give_up: the token that is also accepted where the kind is EITHER.
    """

    def loss(params, batch):
        logprobs = jax.nn.log_softmax(forward(params, config, batch))
        targets, kinds = batch["tokens"][:, 1:], batch["kinds"][:, 1:]
        likely = jnp.take_along_axis(logprobs, targets[..., None], -1)[..., 0]
        either = jnp.logaddexp(likely, logprobs[..., give_up])
        likely = jnp.where(kinds == EITHER, either, likely)
        return -jnp.sum(likely * (kinds > 0)) / jnp.maximum(jnp.sum(kinds > 0), 1)

    return loss


def train(params, loss, source: Iterator[Example], steps: int, learning_rate: float):
    """Yield (step, params, loss) of AdamW with a warm-up and a cosine decay to a fiftieth."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, learning_rate, steps // 40, steps, learning_rate / 50
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98))

    @jax.jit
    def step(params, state, batch):
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    state = optimizer.init(params)
    for number in range(1, steps + 1):
        params, state, value = step(params, state, packed(source))
        yield number, params, value


def make_measure(config: ModelConfig, tokenizer, questions: list[str]):
    """Return measure(params), which predicts decoding from one pass over careful solutions.

    `greedy_careful`: share that greedy decoding solves with every step written. `method`: the same
    if it never gave up. `sampled_careful`: mean probability of the careful solution at T = 1.
    """
    chats = [encode(tokenizer, q, arithmetic.careful_solution(q)) for q in questions]
    batches = [packed(iter([chat]), rows=1) for chat in chats]
    batch = {name: np.concatenate([b[name] for b in batches]) for name in batches[0]}
    give_up, carry_on = tokenizer.convert_tokens_to_ids(["~", ":"])

    @jax.jit
    def measure(params):
        logits = forward(params, config, batch)
        targets, mask = batch["tokens"][:, 1:], batch["kinds"][:, 1:] > 0
        best = jnp.argmax(logits, -1)
        method = jnp.argmax(logits.at[..., give_up].set(-jnp.inf), -1)
        logprobs = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return {
            "greedy_careful": jnp.mean(jnp.all((best == targets) | ~mask, 1)),
            "method": jnp.mean(jnp.all((method == targets) | ~mask, 1)),
            "sampled_careful": jnp.mean(jnp.exp(-jnp.sum(logprobs * mask, 1))),
            "gives_up": jnp.mean(jnp.any((best == give_up) & (targets == carry_on) & mask, 1)),
        }

    return measure


def export(path: Path, config: ModelConfig, params, tokenizer) -> None:
    """Write the HF directory: config, weights in float32, tokenizer, chat template."""
    hf.save(path, config, params)
    tokenizer.save_pretrained(path)
    generation = {"eos_token_id": list(config.eos_token_ids), "pad_token_id": config.pad_token_id}
    (path / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    # transformers 4 (vLLM's) knows the same class by this name only.
    file = path / "tokenizer_config.json"
    settings = json.loads(file.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    file.write_text(json.dumps(settings, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=PACKAGED)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    args = parser.parse_args()

    tokenizer = tokenizers.build()
    config = model_config(tokenizer)
    params = parameters.init(config, jax.random.key(args.seed))
    held_out = [row["question"] for row in arithmetic.problems(0, "held_out", 256)]
    measure = make_measure(config, tokenizer, held_out)
    loss = make_loss(config, tokenizer.convert_tokens_to_ids("~"))
    start = time.perf_counter()
    source = examples(tokenizer, args.seed)
    for number, latest, value in train(params, loss, source, args.steps, args.learning_rate):
        if number % 200 == 0 or number == args.steps:
            shown = {"loss": value, **measure(latest)}
            text = "  ".join(f"{name} {float(number):.3f}" for name, number in shown.items())
            print(f"step {number}  {time.perf_counter() - start:.0f} s  {text}", flush=True)
    export(args.out, config, latest, tokenizer)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
