"""Worked solutions of word problems that leave some of their equations to a calculator. No I/O.

A solution is a conversation, and each answer in it is a row: "53 + 27 = 80.
<tool_call>…</tool_call>", the calculator's output, "The answer is 70.".
"""

import json
import random
import re
from pathlib import Path

from rlx.cli import user_code

word_problems = user_code.load(str(Path(__file__).with_name("word_problems.py")))

NUM_PROBLEMS = 20_000
CALLS = 0.4  # share of equations
TOOLS = {"role": "system", "content": "<tools>calculator(expression)</tools>"}  # smollm2_tools


def rows(levels=tuple(word_problems.LEVELS)):
    """Yield every answer of every solution of these levels, with the conversation before it."""
    rng = random.Random("calculator")
    for problem in word_problems.problems(0, "train", NUM_PROBLEMS):
        if problem["level"] not in levels:
            continue
        talk, said = [TOOLS, {"role": "user", "content": problem["question"]}], []
        for sentence in re.findall(r"[^ ][^.]*\.", problem["solution"]):
            expression, equals, value = sentence.rstrip(".").partition(" = ")
            # Drops the tens-before-ones steps. Without them the model errs, so RL can improve.
            value = value.split(" = ")[-1]
            if not equals or rng.random() > CALLS:
                said.append(f"{expression}{equals}{value}.")
                continue
            call = json.dumps({"name": "calculator", "arguments": {"expression": expression}})
            said.append(f"<tool_call>{call}</tool_call>")
            yield {"question": talk, "completion": " ".join(said)}
            answer = {"role": "assistant", "content": " ".join(said)}
            talk, said = [*talk, answer, {"role": "tool", "content": value}], []
        yield {"question": talk, "completion": " ".join(said)}
