"""Manifests for Kubernetes are valid, and what their pods run is a run."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from rlx.system.jsonl import read_jsonl
from tests.fixtures.commands import path_without_torch

STEPS, SECONDS = 6, 240.0
FLAGS = [
    "--config=configs/arithmetic.py", f"--config.total_steps={STEPS}",
    "--config.rollout.batch_prompts=4", "--config.sampling.n_samples=4", "--config.fleet.slots=16",
    "--config.sampling.max_new_tokens=48", "--config.eval.num_questions=0",
    "--config.observe.writers=()", "--config.checkpoint.every_steps=1",
    "--config.checkpoint.first_step=1", "--config.model.compute_dtype=float32",
    "--config.scheduler.nodes=3", "--config.fleet.num_servers=2",
]  # fmt: skip
GPUS = ["--config=configs/gsm8k.py", "--config.scheduler.nodes=2",
        "--config.scheduler.gpus_per_node=8", "--config.fleet.engine=vllm",
        "--config.allocation_mode=vllm:d8+jax:f8",
        "--config.scheduler.grace_seconds=300"]  # fmt: skip
POD = ["--image=registry.example/rlx:1", "--claim=disk:/shared"]


def printed(*flags):
    done = subprocess.run(
        [sys.executable, "-m", "rlx.k8s", *flags], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": path_without_torch()},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def manifests(*flags):
    status, out, errors = printed(*flags)
    assert status == 0, errors
    return list(yaml.safe_load_all(out))


def script_of(job):
    return job["spec"]["template"]["spec"]["containers"][0]["command"][2]


@pytest.mark.witnesses
def test_manifests_are_valid_for_kubernetes():
    schemas = pytest.importorskip("kubernetes_validate")
    plain = manifests(*FLAGS, *POD, "--workdir=/shared/a")
    with_gpus = manifests(*GPUS, *POD, "--workdir=/shared/My_run.2")
    (ray,) = manifests(*GPUS, *POD, "--workdir=/shared/a", "--ray")
    groups = [ray["spec"]["rayClusterSpec"]["headGroupSpec"],
              *ray["spec"]["rayClusterSpec"]["workerGroupSpecs"]]  # fmt: skip
    pods = [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, **group["template"]}
            for group in groups]  # fmt: skip
    for each in (*plain, *with_gpus, *pods):
        schemas.validate(each, "1.33", strict=True)
    wrong = {**plain[1], "spec": {**plain[1]["spec"], "completion": 3}}
    with pytest.raises(schemas.ValidationError):
        schemas.validate(wrong, "1.33", strict=True)


def test_a_pod_has_the_processes_and_gpus_of_its_host():
    service, job = manifests(*GPUS, *POD, "--workdir=/shared/My_run.2")
    assert service["metadata"]["name"] == job["metadata"]["name"] == "my-run-2"
    pod = job["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    assert (pod["subdomain"], job["spec"]["completions"]) == ("my-run-2", 2)
    assert pod["terminationGracePeriodSeconds"] == 300
    first, second = re.findall(r"^\d\)\n(.*?)^  ;;", script_of(job), re.DOTALL | re.MULTILINE)
    assert (first.count("rlx.serve"), second.count("rlx.main")) == (8, 1)
    assert "--host=my-run-2-0.my-run-2" in first
    assert "CUDA_VISIBLE_DEVICES=7" in first
    assert "--model=Qwen/" in first, "a model of the hub is loaded by the pod itself"


def test_servers_wait_for_random_weights():
    """They ended without them, and their restarts were over before a trainer had written some."""
    flags = (*FLAGS, *POD, "--workdir=/shared/a")
    for random in (False, True):
        script = script_of(manifests(*flags, f"--config.model.random_init={random}")[1])
        waits = "until [ -e /shared/a/initial/config.json ]; do sleep 1; done; again env" in script
        assert waits == random
        subprocess.run(["bash", "-n", "-c", script], check=True)


def test_ray_runs_the_same_command():
    (job,) = manifests(*GPUS, *POD, "--workdir=/shared/a", "--ray")
    entry = job["spec"]["entrypoint"]
    assert "--config.scheduler.type=ray" in entry
    assert "--workdir=/shared/a" in entry
    assert "--claim" not in entry
    assert "--ray " not in entry
    assert job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["replicas"] == 1


def test_a_value_may_be_a_word_of_its_own():
    words = [word for flag in (*POD, "--workdir=/shared/a", "--name=b") for word in flag.split("=")]
    assert manifests(*FLAGS, *words)[0]["metadata"]["name"] == "b"
    (ray,) = manifests(*FLAGS, *words, "--ray")
    given = shlex.split(ray["spec"]["entrypoint"])
    assert given[3 : 4 + len(FLAGS)] == [*FLAGS, "--workdir=/shared/a"]


def test_the_page_s_command_prints_them():
    page = (Path(__file__).parents[2] / "docs/cluster.md").read_text()
    (command,) = re.findall(r"^python -m rlx\.k8s.*?(?=^```)", page, re.DOTALL | re.MULTILINE)
    command = command.replace("python", sys.executable, 1)
    there = {**os.environ, "PYTHONPATH": path_without_torch()}
    done = subprocess.run(command, shell=True, capture_output=True, text=True, env=there)
    kinds = [each["kind"] for each in yaml.safe_load_all(done.stdout)]
    assert kinds == ["Service", "Job"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--image=a", "--claim=disk:/shared", "--workdir=/other/a"], "a directory below /PATH"),
        (["--claim=disk:/shared", "--workdir=/shared/a"], "give an image"),
        (["--image=a", "--claim=disk", "--workdir=/shared/a"], "NAME:/PATH"),
        ([*POD, "--workdir=/shared/2026-11-29"], "takes no name '2026-11-29'; give --name"),
        ([*POD, "--workdir=/shared/день"], "takes no name ''"),
        ([*POD, "--workdir=/shared/a", "--config.allocation_mode=auto"], "rlx plan"),
        ([*POD, "--workdir=/shared/a", "--config.cluster.processes=4"], "use fewer"),
    ],
)
def test_what_cannot_be_is_one_line(flags, words):
    status, out, errors = printed(*FLAGS, *flags)
    assert (bool(status), out, errors.count("\n"), words in errors) == (True, "", 1, True), errors


class Pods:
    """The pods of a job, as processes of this machine."""

    def __init__(self, script: str, directory: Path):
        self._script, self._directory = script, directory
        self.all: dict[int, subprocess.Popen] = {}

    def start(self, index: int) -> None:
        there = Path(sys.executable).parent
        python = self._directory / "bin/python3"
        python.parent.mkdir(exist_ok=True)
        if not python.exists():  # what the script calls, in the image
            python.write_text(f'#!/bin/sh\nexec {there}/python "$@"\n')
            python.chmod(0o755)
        with (self._directory / f"pod-{index}").open("a") as out:
            self.all[index] = subprocess.Popen(
                ["bash", "-c", self._script], stdout=out, stderr=out, stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "JOB_COMPLETION_INDEX": str(index),
                     "PATH": f"{python.parent}:{os.environ['PATH']}",
                     "PYTHONPATH": path_without_torch()},
            )  # fmt: skip

    def log(self, index: int) -> str:
        return (self._directory / f"pod-{index}").read_text()


@pytest.fixture
def pods(tmp_path):
    flags = (*FLAGS, "--image=a", f"--claim=disk:{tmp_path}", f"--workdir={tmp_path}/a")
    script = re.sub(r"\ba-\d\.a\b", "127.0.0.1", script_of(manifests(*flags)[1]))
    made = Pods(script, tmp_path)
    yield made
    for pod in made.all.values():
        for child in children(pod.pid):
            os.kill(child, signal.SIGKILL)
        pod.kill()
        pod.wait()


def children(pid):
    import psutil

    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def wait(condition, what):
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, what()
        time.sleep(0.1)


def test_a_pod_ends_when_one_of_its_servers_is_not_started_again(tmp_path):
    """It went on without it as long as another one ran."""
    flags = (*FLAGS, "--config.scheduler.nodes=2", "--config.fleet.max_restarts=0", "--image=a")
    claim = f"--claim=disk:{tmp_path}", f"--workdir={tmp_path}/a"
    script = script_of(manifests(*flags, *claim)[1])
    root = Path(re.search("^root=(.*?) ", script, re.MULTILINE)[1])
    root.mkdir(parents=True)
    for name in ("servers", "token"):
        (root / name).touch()
    python = tmp_path / "python3"
    pids = tmp_path / "pids"
    pids.touch()
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *--seed=0*) exit 1;; esac\necho $$ >> {pids}\nexec sleep 100\n'
    )
    python.chmod(0o755)
    pod = subprocess.Popen(
        ["bash", "-c", script], stdin=subprocess.DEVNULL,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "JOB_COMPLETION_INDEX": "1"},
    )  # fmt: skip
    try:
        assert pod.wait(20) == 1
    finally:
        pod.kill()
        pod.wait()
        for pid in map(int, pids.read_text().split()):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_pods_train_through_a_lost_server_and_a_drained_node(pods, tmp_path):
    for index in range(3):
        pods.start(index)

    def steps():
        return [record["step"] for record in read_jsonl(tmp_path / "a/metrics.jsonl")]

    def logs():
        return "\n".join(map(pods.log, pods.all))

    wait(lambda: len(steps()) >= 1, logs)
    for child in children(pods.all[1].pid):
        os.kill(child, signal.SIGKILL)  # the server and what would restart it
    wait(lambda: pods.all[1].poll() is not None, logs)
    assert pods.all[1].wait() == 1, "Kubernetes restarts the container"
    pods.start(1)
    wait(lambda: len(steps()) >= 2, logs)
    pods.all[0].send_signal(signal.SIGTERM)  # its node is drained
    wait(lambda: pods.all[0].poll() is not None, logs)
    assert pods.all[0].wait() == 130, logs()
    assert all(pods.all[i].poll() is None for i in (1, 2)), "the servers wait"
    pods.start(0)
    wait(lambda: all(pod.poll() is not None for pod in pods.all.values()), logs)
    assert [pods.all[i].wait() for i in range(3)] == [0, 0, 0], logs()
    assert steps() == list(range(1, STEPS + 1))
    assert "resum" in pods.log(0)
