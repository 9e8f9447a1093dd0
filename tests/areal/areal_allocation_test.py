"""AReaL's allocations, of all releases, become rlx's, and what changes is reported."""

import re

import pytest

from rlx.areal.areal_allocation import translate
from rlx.base import UserError
from rlx.launch.allocation import parse
from rlx.run import flags as command_line

# text, rlx's form, GPUs
READ = [
    ("sglang:d12p1t1", "vllm:d12", 12),
    ("sglang:d96p1t1", "vllm:d96", 96),
    ("sglang:d4+archon:d4", "vllm:d4+jax:f4", 8),
    ("vllm:d4p1t1", "vllm:d4", 4),
    ("sglang:t2", "vllm:d1t2", 2),
    ("sglang:d4t2+fsdp:d8", "vllm:d4t2+jax:f8", 16),
    ("sglang:d4p1t1 + fsdp:d4p1t1", "vllm:d4+jax:f4", 8),
    ("vllm:d2t4+megatron:d2p2t4", "vllm:d2t4+jax:f4t4", 24),
    ("vllm:d2t4+megatron:d2p2t4e4", "vllm:d2t4+jax:f4t4e4", 24),
    ("fsdp:d8", "jax:f8", 8),
    ("fsdp:d4t2c2", "jax:f4t2c2", 16),
    ("archon:d2c2t2p2e2", "jax:f4t2c2e2", 16),
    ("megatron:(attn:d4p2t2c2|ffn:d2p2t4e2)", "jax:f8t2c2e2", 32),
    ("megatron:attn:d1p12t4|ffn:d1p12e4", "jax:f12t4e4", 48),
    ("megatron:(attn:d4p2t2|ffn:t1e4)", "jax:f8t2e4", 16),
    ("sglang:d8t4+megatron:(attn:d4p4t2|ffn:d2p4e4)", "vllm:d8t4+jax:f16t2e4", 64),
    ("sglang[rollout]:d2+fsdp[actor]:d4", "vllm[rollout]:d2+jax[actor]:f4", 6),
    ("vllm[g]:d4|fsdp[a]:d4", "vllm[g]:d4|jax[a]:f4", 4),
    ("sglang:d4+d4", "vllm:d4+jax:f4", 8),
    ("sglang:d4+cpu", "vllm:d4+eval", 4),
    ("sglang:d4+eval", "vllm:d4+eval", 4),
    ("sglang.d4p1t1+d4p1t1", "vllm:d4+jax:f4", 8),
    ("sglang.d4m2p1+d4m2p1", "vllm:d4t2+jax:f4t2", 16),
    ("d4m2p1+sglang.d4m2p1", "jax:f4t2+vllm:d4t2", 16),
    ("d4m2p1", "vllm:d4t2|jax:f4t2", 8),
    ("sglang.d4p1m1+actor_train:d2p1m2,ref_inf:d4p1m1", "vllm:d4+jax:f2t2", 8),
    ("vllm:d4t2+torch:d2f4t2", "vllm:d4t2+torch:d2f4t2", 24),
]  # fmt: skip

WRONG = [
    ("fsdp:d4p2", "cannot read the sizes 'd4p2' of 'fsdp:d4p2'; give each of d, t, c"),
    ("megatron:(attn:d4|ffn:d3e2)", "have 4 and 6 GPUs"),
    ("megatron:(attn:d4p2|ffn:p1e2)", "in 2 and 1 stages; give both as many"),
    ("megatron:d2e4", "do not divide the 2 GPUs"),
    ("sglang[r]:d2+fsdp[a]:d4|fsdp[c]:d4", "one trainer, which includes critic"),
    ("vllm:d2t1,fsdp:d4", "cannot read the sizes 'd2,fsdp:d4'"),
    ("vllm[r]:d2|fsdp[a]:d4", "give both the same number"),
    ("fsdp(actor):d4", "'fsdp(actor):d4' is not ENGINE:SIZES"),
    ("heuristic", "'heuristic' is not ENGINE:SIZES"),
    ("", "'' is not ENGINE:SIZES"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "ours", "gpus"), READ)
def test_an_allocation_has_the_same_gpus_in_rlxs_form(text, ours, gpus):
    assert translate(text)[0] == ours
    assert parse(ours).gpus == gpus
    assert translate(ours) == (ours, ())


def test_changes_are_reported():
    assert translate("sglang:d4+megatron:d2p2t4e8")[1] == (
        "sglang runs as vllm",
        "megatron runs as jax",
        "megatron has no stages here: p2 shards weights, as f does",
        "megatron's experts are sharded as other weights are: e8 is left out",
    )


@pytest.mark.parametrize(("text", "words"), WRONG)
def test_an_allocation_that_rlx_cannot_have_is_one_line(text, words):
    with pytest.raises(UserError, match=re.escape(words)) as error:
        translate(text)
    assert "\n" not in str(error.value)


def test_the_key_takes_areals_form_on_a_command_line(capsys):
    def allocated(text):
        argv = ["rlx.main", "--config=configs/arithmetic.py", f"--config.allocation_mode={text}"]
        return command_line.parse(argv, workdir="")[0].allocation_mode

    assert allocated("sglang.d4m2p1+d4m2p1") == "vllm:d4t2+jax:f4t2"
    assert capsys.readouterr().err == "allocation_mode: sglang runs as vllm\n"
    assert allocated("jax:d2+jax:f1") == "jax:d2+jax:f1"
    with pytest.raises(UserError, match="'fsdp:q2'"):
        allocated("sglang:d4+fsdp:q2")
