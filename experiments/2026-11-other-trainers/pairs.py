"""Measure an exported reward model: held-out pairs ordered rightly, by the kind of wrong answer.

    python -m rlx.main --config=configs/arithmetic_reward_model.py --workdir=OUT/rm
    python -m experiments.2026-11-other-trainers.pairs OUT/rm/hf [PAIRS]

transformers loads the directory. A wrong answer either gives up at a step and guesses, or makes one
mistake and continues with it.
"""

import sys

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlx.rollout import arithmetic

PAIRS = 1000


def scores(directory: str, questions: list[str], answers: list[str]) -> torch.Tensor:
    """Return the score at each answer's end token, [N] float32."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
    chats = [
        [{"role": "user", "content": q}, {"role": "assistant", "content": a}]
        for q, a in zip(questions, answers, strict=True)
    ]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False).rstrip("\n") for chat in chats]
    found = []
    with torch.no_grad():
        for text in texts:
            found.append(model(**tokenizer(text, return_tensors="pt")).logits[0, 0])
    return torch.stack(found)


def main() -> None:
    """Print the table in markdown."""
    directory, count = sys.argv[1], int((*sys.argv[2:], PAIRS)[0])
    questions = [row["question"] for row in arithmetic.problems(1, "held_out", count)]
    wrong = [arithmetic.wrong_solution(q) for q in questions]
    careful = [arithmetic.careful_solution(q) for q in questions]
    right = scores(directory, questions, careful) > scores(directory, questions, wrong)
    guessed = torch.tensor(["~" in answer for answer in wrong])
    print("| wrong answer | pairs | right |\n|---|---|---|")
    for name, chosen in (("gives up and guesses", guessed), ("a mistake, carried", ~guessed)):
        print(f"| {name} | {int(chosen.sum())} | {right[chosen].float().mean():.3f} |")


if __name__ == "__main__":
    main()
