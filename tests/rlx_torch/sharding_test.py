"""Processes of the trainer in PyTorch: equal to one, and refused in a line where they cannot be."""

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from rlx.base import UserError
from rlx_torch import sharding

SECONDS = 900.0  # on two cores that do something else, too


@pytest.mark.slow
def test_two_and_four_processes_do_what_one_does(tmp_path):
    """Updates, scores, checkpoints on other meshes, numbers that are not finite, memory to load."""
    program, root = Path(__file__).with_name("ranks.py"), Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, program, tmp_path], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True, env={**os.environ, "PYTHONPATH": str(root)},
    ) as started:  # fmt: skip
        try:
            said, _ = started.communicate(timeout=SECONDS)
        finally:
            if started.poll() is None:
                os.killpg(started.pid, signal.SIGKILL)
    assert started.returncode == 0, said


def test_processes_that_share_a_gpu_are_refused_in_one_line(monkeypatch):
    for name, found in (("is_available", True), ("device_count", 1)):
        monkeypatch.setattr(torch.cuda, name, lambda found=found: found)
    same = SimpleNamespace(uuid="GPU-0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: same)
    with socket.create_server(("127.0.0.1", 0)) as free:
        service = f"127.0.0.1:{free.getsockname()[1]}"
    said = []

    def join(index):
        with pytest.raises(UserError) as refused:
            sharding.join(service, index, 2, 60)
        said.append(str(refused.value))

    threads = [threading.Thread(target=join, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(said) == 2
    assert all("2 processes of the trainer share 1 GPU of" in text for text in said)


def small(**more):
    config = Qwen2Config(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, **more,
    )  # fmt: skip
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def test_what_tensor_cuts_is_what_transformers_plan_says():
    untied = sharding.check_plan(small(tie_word_embeddings=False))
    assert untied["lm_head"] == "colwise_gather_output"
    assert untied["model.layers.*.mlp.down_proj"] == "rowwise"
    tied = sharding.check_plan(small(tie_word_embeddings=True))
    shared = ("lm_head", "model.embed_tokens")  # newer transformers cut this too, untied
    assert tied == {name: style for name, style in untied.items() if name not in shared}


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        ({"model.layers.*.mlp.experts": "moe_tp_experts"}, "unknown style 'moe_tp_experts'"),
        ({}, "no plan"),
    ],
)
def test_a_model_that_tensor_cannot_cut_is_one_line(plan, why):
    config = SimpleNamespace(model_type="some", tie_word_embeddings=False, architectures=["Some"])
    model = SimpleNamespace(tp_plan=plan, config=config)
    with pytest.raises(UserError, match=f"{why}.*use only fsdp"):
        sharding.check_plan(model)
