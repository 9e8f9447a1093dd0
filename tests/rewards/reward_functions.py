"""Reward functions that misbehave, for the workers of reward_pool_test.py to import."""

import ctypes
import os
import signal
import time

import numpy as np


def length(prompt, completion, prompt_ids, completion_ids, *, answer, **row):
    return len(completion) + len(completion_ids) / 10


def truth(prompt, completion, prompt_ids, completion_ids, **row):
    return completion == row["answer"]


def echo(prompt, completion, prompt_ids, completion_ids, *, answer, **row):
    """Behaves as the completion says; a `marker` file in the row shows that it has begun."""
    if "marker" in row:
        open(row["marker"], "w").close()
    if completion == "loop":
        while True:
            pass
    if completion == "stuck in C":
        ctypes.PyDLL(None).sleep(1000)  # holds the interpreter lock: no Python handler can run
    if completion == "slow":
        time.sleep(0.4)
    if completion == "raise":
        raise LookupError("no such thing")
    if completion == "exit":
        raise SystemExit(3)
    if completion == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    returned = {
        "nan": float("nan"), "inf": float("inf"), "none": None, "text": "1.0", "list": [1.0, 0.0],
        "array": np.ones(1), "huge": 1e39, "endless": 10**400,
    }  # fmt: skip
    return returned.get(completion, 1.0)


def few(completion, tokens, more, ids):
    """Names its arguments as it likes, and takes no column of the row."""
    return len(tokens)


def digits(prompt, completion, prompt_ids, completion_ids, **row):
    return float(sum(completion_ids) % 7)
