"""Processes of a run have a place, GPUs and a command each, and fit their hosts or none starts."""

import subprocess

import pytest

from rlx.base import UserError
from rlx.launch.allocation import parse
from rlx.launch.processes import addresses, processes, table
from rlx.launch.run_secrets import make_secrets

EIGHT = tuple(map(str, range(8)))


def planned(demand, hosts, **more):
    return processes(hosts, **demand, trainer=("main",), server=("serve",), port=9000, **more)


def seats(plan):
    return [(p.role, p.index, p.host, "".join(p.gpus)) for p in plan]


def test_a_jax_trainer_has_a_process_on_each_host_with_all_that_it_has_there():
    demand = {"servers": 4, "library": "jax", "allocation": parse("vllm:d4+jax:f12")}
    plan = planned(demand, {"a": EIGHT, "b": EIGHT}, seed=7)
    assert seats(plan) == [
        ("trainer", 0, "a", "4567"), ("trainer", 1, "b", "01234567"),
        *(("server", i, "a", str(i)) for i in range(4)),
    ]  # fmt: skip
    assert plan[1].env == {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
    assert plan[1].argv == (
        "main", "--config.cluster.processes=2", "--config.cluster.coordinator=a:9000",
        "--config.cluster.process=1",
    )  # fmt: skip
    assert plan[3].argv == ("serve", "--host=a", "--port=9002", "--seed=8")
    assert plan[3].env == {"JAX_PLATFORMS": "cuda", "CUDA_VISIBLE_DEVICES": "1"}
    assert addresses(plan) == tuple(f"a:{port}" for port in range(9001, 9005))
    assert table(plan).splitlines()[1] == "b: trainer 1: GPU 0, 1, 2, 3, 4, 5, 6, 7"


def test_servers_have_metrics_at_the_ports_above_the_trainer_s():
    plan = planned({"servers": 2}, {"a": (), "b": ()}, metrics_port=9200)
    assert [p.argv[-2:] for p in plan[1:]] == [
        ("--metrics-host=b", "--metrics-port=9201"), ("--metrics-host=b", "--metrics-port=9202"),
    ]  # fmt: skip


def test_a_torch_trainer_has_a_process_for_each_gpu_by_its_name():
    demand = {"servers": 1, "library": "torch", "allocation": parse("vllm:d1t2+torch:f4")}
    plan = planned(demand, {"a": ("g0", "g1", "g2", "g3"), "b": ("h0", "h1", "h2", "h3")})
    assert seats(plan) == [
        ("trainer", 0, "a", "g2"), ("trainer", 1, "a", "g3"), ("trainer", 2, "b", "h0"),
        ("trainer", 3, "b", "h1"), ("server", 0, "a", "g0g1"),
    ]  # fmt: skip


def test_without_an_allocation_the_trainer_has_whole_hosts_and_a_server_one_gpu():
    hosts = {"a": EIGHT, "b": EIGHT, "c": EIGHT}
    plan = planned({"servers": 3, "trainers": 2}, hosts)
    assert seats(plan)[2:] == [("server", i, "c", str(i)) for i in range(3)]
    assert [len(p.gpus) for p in plan[:2]] == [8, 8]


def test_without_an_allocation_a_server_has_its_gpus_on_one_host():
    """It had one, and vLLM's workers found no other."""
    plan = planned({"servers": 3, "tensor_parallel": 4}, dict.fromkeys("abc", EIGHT))
    places = [(p.host, len(p.gpus)) for p in plan if p.role == "server"]
    assert places == [("b", 4), ("b", 4), ("c", 4)]


def test_without_gpus_the_trainer_comes_first_and_servers_take_the_hosts_that_are_left():
    plan = planned({"servers": 3, "trainers": 1}, {"::1": (), "b": (), "c": ()})
    assert seats(plan) == [
        ("trainer", 0, "::1", ""), ("server", 0, "b", ""), ("server", 1, "c", ""),
        ("server", 2, "b", ""),
    ]  # fmt: skip
    assert plan[0].argv == ("main", "--config.cluster.processes=1")
    assert (plan[0].env, plan[1].env) == ({}, {"JAX_PLATFORMS": "cpu"})
    alone = planned({"servers": 1}, {"::1": ()})
    assert addresses(alone) == ("[::1]:9001",)


@pytest.mark.parametrize(
    ("demand", "hosts", "said"),
    [
        ({"servers": 1, "trainers": 3}, {"a": (), "b": ()}, "processes=3 .* and there are 2"),
        ({"servers": 9}, {"a": ("0",), "b": ("0",)}, "needs 10 GPUs; .* a: 1, b: 1"),
        ({"servers": 1, "allocation": parse("vllm:d1+jax:f4")}, {"a": ("0", "1")}, "needs 5 GPUs"),
        ({"servers": 1, "allocation": parse("vllm:d1t4")}, {"a": ("0", "1"), "b": ("0", "1")},
         "would be on 2 hosts"),
        ({"servers": 1, "allocation": parse("vllm[s]:d1|jax[t]:f1")}, {"a": ("0",)}, "write . for"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said_with_the_arithmetic(demand, hosts, said):
    with pytest.raises(UserError, match=said):
        planned(demand, hosts)


def test_the_secrets_of_a_run_are_for_its_user_alone_and_name_its_hosts(tmp_path):
    make_secrets(tmp_path / "s", ("n0", "10.0.0.2", "n0"))
    first = (tmp_path / "s" / "token").read_text()
    make_secrets(tmp_path / "s", ("n0", "10.0.0.2"))
    assert (tmp_path / "s" / "token").read_text() != first
    assert {p.name: p.stat().st_mode & 0o777 for p in (tmp_path / "s").iterdir()} == {
        "token": 0o600, "cert.pem": 0o600, "key.pem": 0o600, "bundle.pem": 0o600,
    }  # fmt: skip
    shown = subprocess.run(
        ["openssl", "x509", "-in", tmp_path / "s" / "cert.pem", "-noout", "-ext", "subjectAltName"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert "DNS:n0, IP Address:10.0.0.2" in shown
    with pytest.raises(UserError, match="made no certificate"):
        make_secrets(tmp_path / "s", ("n 0,IP:x",))
