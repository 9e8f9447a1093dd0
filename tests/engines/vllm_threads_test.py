"""Threads of vLLM on a CPU: small models leave a core to the server and its clients."""

import os

import pytest

from rlx.engines.vllm import vllm_start


@pytest.mark.parametrize(
    ("cores", "megabytes", "threads"), [(2, 3, "1"), (8, 3, "7"), (1, 3, "1"), (2, 500, "2")]
)
def test_a_small_model_leaves_a_core(cores, megabytes, threads, monkeypatch):
    pools = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # a server gets both from who starts it
    monkeypatch.setattr(os, "environ", dict.fromkeys(pools, str(cores)))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    vllm_start._set_environment(True, 1, megabytes << 20)
    assert {os.environ[name] for name in pools} == {threads}
