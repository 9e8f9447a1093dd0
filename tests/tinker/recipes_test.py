"""Unmodified recipes of tinker-cookbook run to their end against a server of the embedded model.

Its tokenizer stands in a cache of the hub for that of the model which recipes name, and files in
the working directory for data sets of the hub: nothing is downloaded.
"""

import json
import os
import random
import shutil
import subprocess
import sys

import pytest

from rlx.model.directory import resolve

pytest.importorskip("tinker_cookbook", reason="tinker-cookbook is not installed")
pytestmark = [pytest.mark.witnesses, pytest.mark.slow]
NAME = "Qwen/Qwen3-8B-Base"  # whose renderer in the cookbook's table needs no special tokens
MATH = "renderer_name=role_colon groups_per_batch=4 group_size=4 max_steps=2 eval_every=0"
BUILDER = "tinker_cookbook.supervised.data:FromConversationFileBuilder"
COMMON = "dataset_builder.common_config"
GSM8K = "tinker_cookbook.recipes.math_rl.math_env:Gsm8kDatasetBuilder"
RECIPES = {
    "math_rl.train": f"env=arithmetic {MATH} loss_fn=importance_sampling",
    "math_rl.train_ppo": f"env=gsm8k {MATH} loss_fn=ppo",
    "rl_loop": "loss_fn=cispo batch_size=8 group_size=4 max_steps=2 max_tokens=16",
    "rl_basic": f"loss_fn=importance_sampling max_tokens=16 max_steps=2 dataset_builder={GSM8K} "
    "dataset_builder.batch_size=4 dataset_builder.group_size=4 "
    f"dataset_builder.renderer_name=role_colon dataset_builder.model_name_for_tokenizer={NAME}",
    "sl_loop": "batch_size=8 max_steps=3 max_length=256",
    "sl_basic": f"dataset_builder={BUILDER} dataset_builder.file_path=talk.jsonl "
    f"{COMMON}.batch_size=8 {COMMON}.max_length=256 {COMMON}.renderer_name=role_colon "
    f"{COMMON}.model_name_for_tokenizer={NAME}",
    "preference.dpo.train": "renderer_name=role_colon dataset=hhh batch_size=4 max_steps=2 "
    "max_length=256",
    "prompt_distillation.train": "renderer_name=role_colon file_path=talk.jsonl batch_size=8 "
    "max_steps=2 max_length=256",
}


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, rows)))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A working directory with data sets, and a cache of the hub with the tokenizer."""
    place, rng = tmp_path_factory.mktemp("recipes"), random.Random(0)
    cache = place / "hub/models--Qwen--Qwen3-8B-Base"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs/main").write_text("only")
    shutil.copytree(resolve("rlx:arithmetic"), cache / "snapshots/only")
    for split, count in (("train", 64), ("test", 16)):
        pairs = [(rng.randint(1, 9), rng.randint(1, 9)) for _ in range(count)]
        talks = [
            {"messages": [{"role": "user", "content": f"{a}+{b}?"},
                          {"role": "assistant", "content": f"{a + b}"}]} for a, b in pairs
        ]  # fmt: skip
        write(place / f"HuggingFaceH4/no_robots/{split}.jsonl", talks)
        write(place / "talk.jsonl", talks)
        sums = [{"question": f"{a}+{b}?", "answer": f"#### {a + b}"} for a, b in pairs]
        write(place / f"openai/gsm8k/{split}.jsonl", sums)
        begin = [f"\n\nHuman: {a}+{b}?\n\nAssistant: " for a, b in pairs]
        both = [
            {"chosen": f"{start}{a + b}", "rejected": f"{start}{a}"}
            for start, (a, b) in zip(begin, pairs, strict=True)
        ]
        write(place / f"Anthropic/hh-rlhf/{split}.jsonl", both)
    files = "".join(f"  - {{split: {s}, path: {s}.jsonl}}\n" for s in ("train", "test"))
    (place / "openai/gsm8k/README.md").write_text(
        f"---\nconfigs:\n- config_name: main\n  data_files:\n{files}---\n"
    )
    return place


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_runs_to_its_end(tinker_server, place, recipe):
    module = recipe.removesuffix("_ppo")
    log = place / f"{recipe}-{tinker_server.trainer}"  # an older one would be continued
    command = [
        sys.executable, "-m", f"tinker_cookbook.recipes.{module}", f"model_name={NAME}",
        f"log_path={log}", *RECIPES[recipe].split(),
    ]  # fmt: skip
    env = {
        **os.environ, "HF_HOME": str(place), "HF_HUB_OFFLINE": "1", "TINKER_API_KEY": "tml-recipes",
        "TINKER_BASE_URL": tinker_server.url, "TINKER_TELEMETRY": "0",
    }  # fmt: skip
    done = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "sampler_path" in (log / "checkpoints.jsonl").read_text()
