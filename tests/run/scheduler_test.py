"""A run is planned for other hosts without them, and what no scheduler can start is one line."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from threading import Thread
from unittest.mock import MagicMock

import psutil
import pytest

from rlx.base import UserError
from rlx.config import check, default
from rlx.launch import slurm
from rlx.run import scheduler, slurm_run
from rlx.run.trainers import PARENT
from tests.fixtures.commands import ended
from tests.run.kill_test import COMMAND
from tests.run.main_test import processes_of, records, wait_for

ROOT = Path(__file__).parents[2]
DRY = re.search(r"<!-- run by a test -->\n```sh\npython (.*?)```",
                (ROOT / "docs" / "cluster.md").read_text(), re.DOTALL)  # fmt: skip


def planned(*flags, workdir=None, **environment):
    command = shlex.split(DRY[1].replace("\\\n", ""))
    command = [*command, *([f"--workdir={workdir}"] if workdir else []), *flags]
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, **environment},
    )  # fmt: skip


def test_the_dry_run_of_the_docs_writes_the_script_and_the_config_and_stops(tmp_path):
    done = planned(workdir=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:3] == [
        "node0: trainer 0: CPU", "node1: trainer 1: CPU", "node2: server 0: CPU; server 1: CPU",
    ]  # fmt: skip
    there = tmp_path / "slurm" / "dry-run"
    assert json.loads((there / "config.json").read_text())["cluster"]["processes"] == 2
    script = (there / "job.sh").read_text()
    subprocess.run(["bash", "-n", there / "job.sh"], check=True)
    assert "--dry_run" not in script  # it can be submitted as it is
    for line in ("#SBATCH --nodes=3", "#SBATCH --exclusive", '"${nodes[2]}":'):
        assert line in script
    assert script.count('--config.cluster.coordinator="${nodes[0]}":') == 2
    assert script.count('--config.online.host="${nodes[0]}" --config.online.tls_cert=') == 2
    assert "<<" not in re.sub(r"<<< |< <\(", "", script)
    assert [p.name for p in (tmp_path / "slurm").iterdir()] == ["dry-run"]


def test_metrics_are_at_the_hosts_addresses_behind_the_run_s_certificate(tmp_path):
    done = planned("--config.observe.metrics_port=9200", workdir=tmp_path)
    assert done.returncode == 0, done.stderr
    script = (tmp_path / "slurm" / "dry-run" / "job.sh").read_text()
    cert = str(tmp_path / "slurm" / "cert.pem")
    for port in (9201, 9202):
        assert f'--metrics-host="${{nodes[2]}}" --metrics-port={port}' in script
    assert script.count(f"--tls-client-ca={cert}") == 2
    assert script.count(f"--config.fleet.tls.cert={cert} --config.fleet.tls.key=") == 2
    assert script.count('--config.observe.metrics_host="${nodes[0]}"') == 2


def test_a_dry_run_downloads_no_weights_and_its_script_can_be_submitted(
    tmp_path, tiny_model_dir, monkeypatch
):
    import huggingface_hub

    asked = []

    def download(name, allow_patterns):
        asked.append(allow_patterns)
        there = tmp_path / "snapshot"
        copied = (path for pattern in allow_patterns for path in tiny_model_dir.glob(pattern))
        there.mkdir(exist_ok=True)
        for path in copied:
            shutil.copyfile(path, there / path.name)
        return str(there)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    config = config_of(model__path="owner/name")
    config.scheduler.nodes, config.fleet.num_servers = 2, 1
    assert scheduler.launch(config, tmp_path, ["--config=x.py"], True) == 0
    assert not list(tmp_path.rglob("*.safetensors"))
    script = tmp_path / "slurm" / "dry-run" / "job.sh"
    assert "--model=owner/name" in script.read_text()
    slurm_run._write(config, tmp_path, script.parent, ["--config=x.py"], "")
    assert f"--model={tmp_path}/snapshot" in script.read_text()
    assert list(tmp_path.rglob("*.safetensors"))
    assert "*.json" in asked[0]


def config_of(**keys):
    config = default()
    config.model.path, config.data.train = "rlx:arithmetic", "rows.jsonl"
    config.scheduler.type = "slurm"
    for key, value in keys.items():
        section, _, name = key.partition("__")
        config[section][name] = value
    return config


@pytest.mark.parametrize(
    ("gpus", "keys", "dtype"),
    [
        ((), {}, "float32"),
        (("0",), {}, "bfloat16"),
        ((), {"model__compute_dtype": "bfloat16"}, "bfloat16"),
        (("0",), {"model__compute_dtype": "float32"}, "float32"),
        (("0",), {"model__publish_dtype": "float32"}, "float32"),
    ],
)
def test_servers_have_the_dtype_that_the_trainer_publishes(gpus, keys, dtype, tmp_path):
    """With model.publish_dtype=auto they computed in float32, whatever the trainer published."""
    config = config_of(**keys)
    hosts = {"a": gpus, "b": gpus}
    plan = scheduler.processes_of(config, tmp_path, [], hosts, tmp_path, 20_000)
    found = {p.role: [word for word in p.argv if "dtype=" in word] for p in plan}
    published = f"--config.model.publish_dtype={dtype}"
    assert found == {"trainer": [published], "server": [f"--dtype={dtype}"]}


def test_servers_that_sleep_are_refused_before_a_job_waits_for_its_nodes(tmp_path):
    with pytest.raises(UserError, match=r"fleet\.sleep=cache with servers that a scheduler"):
        scheduler.launch(config_of(fleet__sleep="cache"), tmp_path, ["--config=x.py"], True)


def test_no_second_job_is_submitted_while_slurm_does_not_answer_about_the_first(
    tmp_path, monkeypatch
):
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "job.json").write_text('{"job": "7", "attempt": "attempt-1"}')
    for name, line in {"scontrol": "exit 1", "sbatch": "touch $0.called; exit 1"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(UserError, match="Slurm does not answer about job 7"):
        scheduler.launch(config_of(), tmp_path, ["--config=x.py"], False)
    assert not (tmp_path / "sbatch.called").exists()


def test_an_error_while_a_job_is_followed_does_not_cancel_it_and_ctrl_c_does(tmp_path, monkeypatch):
    (tmp_path / "scancel").write_text("#!/bin/sh\ntouch $0.called\n")
    (tmp_path / "scancel").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for wrong, cancels in ((OSError("the disk is away"), False), (KeyboardInterrupt(), True)):
        monkeypatch.setattr(slurm, "job", MagicMock(side_effect=wrong))
        with pytest.raises(type(wrong)):
            slurm_run._JobMonitor("7", tmp_path).follow()
        assert (tmp_path / "scancel.called").exists() == cancels


@pytest.mark.parametrize(
    ("steps", "by_itself", "attempts"),
    [((0,), True, 1), ((2, 2), True, 2), ((2, 3, 4), True, 3), ((0, 0, 0), False, 3)],
)
def test_a_run_that_fails_by_itself_without_a_step_is_not_retried(
    steps, by_itself, attempts, tmp_path
):
    left = list(steps)

    def attempt():
        (tmp_path / "metrics.jsonl").write_text(f'{{"step": {left.pop(0)}}}\n')
        return scheduler.Ended(1, "it broke", by_itself)

    scheduler.retry(attempt, config_of(scheduler__retries=2), tmp_path)
    assert len(steps) - len(left) == attempts == len(steps)


@pytest.mark.slow
def test_a_local_run_goes_on_by_itself_when_its_trainer_is_killed(tmp_path):
    run, flags = tmp_path / "run", ("--config.scheduler.retries=1", "--config.total_steps=4")
    process = subprocess.Popen(
        [*COMMAND, f"--workdir={run}", *flags, "--config.checkpoint.first_step=1",
         "--config.checkpoint.every_steps=1"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "RLX_TEST_RUN": str(run), "PYTHONPATH": f".:{ROOT}/tests/rewards"},
    )  # fmt: skip
    try:
        wait_for(
            lambda: len(records(run / "metrics.jsonl")) >= 2 or process.poll() is not None, 240
        )
        (trainer,) = psutil.Process(process.pid).children()
        trainer.kill()
        out, _ = process.communicate(timeout=240)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, out
    assert "the run ended by SIGKILL" in out
    assert "resuming from the last checkpoint (retry 1 of 1)" in out
    assert sorted({record["step"] for record in records(run / "metrics.jsonl")}) == [1, 2, 3, 4]
    assert not processes_of(run)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_local_run_with_retries_gets_the_signal_itself(tmp_path, monkeypatch, number):
    """SIGTERM has a deadline, in which a run ends without its long step."""
    program = """
import pathlib, signal, sys, time
def note(number, frame):
    pathlib.Path("got").write_text(str(number))
    sys.exit(130)
for each in (signal.SIGINT, signal.SIGTERM):
    signal.signal(each, note)
pathlib.Path("ready").touch()
time.sleep(60)
"""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-c", program])

    before = signal.getsignal(number)

    def send():
        wait_for(lambda: (tmp_path / "ready").exists() and signal.getsignal(number) is not before)
        os.kill(os.getpid(), number)

    sender = Thread(target=send)
    sender.start()
    assert scheduler.launch(config_of(scheduler__type="local"), tmp_path, [], False) == 130
    sender.join()
    assert int((tmp_path / "got").read_text()) == number


@pytest.mark.slow
def test_a_local_run_with_retries_ends_with_the_sweep_that_started_it(tmp_path):
    """Else it trained on, and the same sweep found its directory in use."""
    flags = ("--config.scheduler.retries=1", "--config.total_steps=1000")
    run = [*COMMAND, f"--workdir={tmp_path}", *flags]
    sweep = f"""
import os, subprocess, time
process = subprocess.Popen({run!r}, env={{**os.environ, {PARENT!r}: str(os.getpid())}})
print(process.pid, flush=True)
time.sleep(600)
"""
    env = {**os.environ, "RLX_TEST_RUN": str(tmp_path), "PYTHONPATH": f".:{ROOT}/tests/rewards"}
    parent = subprocess.Popen([sys.executable, "-c", sweep], stdout=subprocess.PIPE, env=env)
    processes = [psutil.Process(int(parent.stdout.readline()))]
    try:
        wait_for((tmp_path / "running.json").exists)
        processes += processes[0].children()
    finally:
        parent.kill()
        parent.wait()
        late = [process for process in processes if not ended(process, 10)]
        for process in late:
            process.kill()
        parent.stdout.close()
    assert len(processes) == 2
    assert not late


def test_a_local_run_that_cannot_begin_is_not_begun_again(tmp_path):
    done = subprocess.run(
        [*COMMAND, f"--workdir={tmp_path / 'run'}", "--config.scheduler.retries=3",
         "--config.model.path=./nowhere"],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.count("error: ") == 1


def test_slurm_without_sbatch_is_said_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"needs sbatch, which is not on .* login node"):
        scheduler.launch(config_of(), tmp_path / "run", ["--config=x.py"], False)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"scheduler__container": "pyxis"}, "a container needs an image"),
    ],
)
def test_a_scheduler_that_cannot_be_is_refused_by_the_config(keys, said):
    with pytest.raises(UserError, match=said):
        check(config_of(**keys))


def test_what_the_nodes_have_not_and_a_template_that_is_not_there_are_refused(tmp_path):
    for keys, said in (
        ({"cluster__processes": 3, "scheduler__nodes": 2}, "cluster.processes=3 .* there are 2"),
        ({"scheduler__gpus_per_node": 1}, "needs 2 GPUs; .* 0 of them fit on node0: 1"),
        ({"scheduler__template": str(tmp_path / "no.sh")}, "no.sh: No such file"),
    ):
        with pytest.raises(UserError, match=said):
            scheduler.launch(config_of(**keys), tmp_path, [], True)


def test_a_container_and_a_template_of_ones_own_are_in_the_script(tmp_path):
    (tmp_path / "mine.sh").write_text("#!/bin/bash\n<<directives>>\n<<srun>>|<<container>>|<<id>>")
    for kind, wanted in (
        ("pyxis", "--container-image=rl.sqsh --container-mounts="),
        ("apptainer", "apptainer exec --nv --bind "),
    ):
        keys = {"scheduler__container": kind, "scheduler__image": "rl.sqsh",
                "scheduler__template": str(tmp_path / "mine.sh"), "scheduler__qos": "high",
                "scheduler__options": ("--reservation=rl",)}  # fmt: skip
        assert scheduler.launch(config_of(**keys), tmp_path / "run", [], True) == 0
        script = (tmp_path / "run" / "slurm" / "dry-run" / "job.sh").read_text()
        assert wanted in script
        assert "#SBATCH --qos=high\n#SBATCH --reservation=rl\n" in script


@pytest.mark.parametrize("flag", ["--dry_run", "--dry-run", "--dry-run=true"])
def test_a_dry_run_is_not_passed_on_in_either_spelling(tmp_path, monkeypatch, flag):
    passed = []
    launch = lambda config, workdir, flags, dry: passed.extend(flags)  # noqa: E731
    monkeypatch.setattr(slurm_run, "launch", launch)
    scheduler.launch(config_of(), tmp_path, ["--config=x.py", flag, "--config.seed=1"], True)
    assert passed == ["--config=x.py", "--config.seed=1"]
