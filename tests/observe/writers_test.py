"""Read back what TensorBoard, W&B, trackio and MLflow have received, from their files."""

import importlib.util
import json
import math
import os
import sqlite3
import struct
import subprocess
import sys

import pytest

from rlx.base import UserError
from rlx.observe import writers
from rlx.observe.hooks import Hooks
from rlx.observe.metrics import MetricsWriter

needs = {
    name: pytest.mark.skipif(
        not importlib.util.find_spec(name),
        reason=f"needs the extra {name}: pip install -e .[{name}]",
    )
    for name in ("wandb", "trackio", "mlflow")
}


@pytest.fixture
def board(tmp_path):
    """A function that makes the records' writer of a run with the named writers."""
    begun = []

    def make(*names, workdir=tmp_path, step=0, config=None):
        hooks = Hooks(writers.load(names), pytest.fail)
        hooks.begin(config or {}, workdir, step)
        begun.append(hooks)
        return MetricsWriter(workdir, hooks), hooks

    yield make
    for hooks in begun:
        hooks.end("failed")


@pytest.fixture
def read_events():
    """A function from directory to the events of all its files, oldest file first."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    def read(directory):
        for path in sorted(directory.iterdir(), key=lambda p: p.stat().st_mtime_ns):
            data = path.read_bytes()
            while data:
                (length,) = struct.unpack("<Q", data[:8])
                assert struct.unpack("<I", data[8:12])[0] == masked_crc32c(data[:8])
                body, (check,) = (
                    data[12 : 12 + length],
                    struct.unpack("<I", data[12 + length :][:4]),
                )
                assert check == masked_crc32c(body)
                yield Event.FromString(body)
                data = data[16 + length :]

    return read


def test_scalars_dicts_and_histograms_read_back(tmp_path, read_events, board):
    writer, hooks = board("tensorboard", step=2)
    writer.write("metrics.jsonl", {"step": 3, "task_reward": 0.5, "grad_norm": math.nan, "epoch": 1,
                  "seconds": {"wait": 0.25}, "mine": 2, "staleness_histogram": {0: 10, 2: 30},
                  "note": "text", "reward/mine": 3})  # fmt: skip
    writer.write("eval.jsonl", {"step": 3, "greedy_acc": 0.75, "reward/mine": 4})
    hooks.end("finished")
    first, *events = read_events(tmp_path / "tensorboard")
    assert first.file_version == "brain.Event:2"
    assert {event.step for event in events} == {3}
    values = {value.tag: value for event in events for value in event.summary.value}
    scalars = {tag: v.simple_value for tag, v in values.items() if not v.HasField("histo")}
    assert scalars == {"reward/task_reward": 0.5, "run/epoch": 1.0, "speed/seconds_wait": 0.25,
                       "other/mine": 2.0, "eval/greedy_acc": 0.75,
                       "reward/mine": 3.0, "eval/reward/mine": 4.0}  # fmt: skip
    histogram = values["staleness/staleness_histogram"].histo
    assert (histogram.num, histogram.sum, histogram.sum_squares) == (40, 60, 120)
    assert list(histogram.bucket_limit) == [0.5, 2.5]
    assert list(histogram.bucket) == [10, 30]


def test_a_restart_tells_the_board_to_forget(tmp_path, read_events, board):
    for reward in (0.0, 1.0):
        writer, hooks = board("tensorboard")
        writer.write("metrics.jsonl", {"step": 1, "task_reward": reward})
        hooks.end("stopped")
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2, "a restart overwrote the file"
    starts = [e.step for e in read_events(tmp_path / "tensorboard") if e.HasField("session_log")]
    assert starts == [1, 1]


def test_the_board_does_not_bring_torch_or_the_terminal_along(tmp_path):
    """tensorboardX imports torch when it finds it: two seconds of every JAX run's start."""
    script = (
        "import sys; from rlx.observe import metrics, timeline, writers; from pathlib import Path\n"
        "heavy = {'tensorboardX', 'rich', 'matplotlib', 'jax'} & set(sys.modules)\n"
        "assert not heavy, heavy; ((_, hook),) = writers.load(['tensorboard'])\n"
        f"hook.on_begin({{}}, Path({str(tmp_path)!r}), 0)\n"
        "assert 'torch' not in sys.modules and 'tensorboardX' in sys.modules\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)


def test_the_gates_tags_are_the_same_in_every_run(tmp_path, read_events, board):
    """Ports of servers are new in every run; they stay in gate.jsonl."""
    for run, port in (("a", 40123), ("b", 51999)):
        servers = {f"127.0.0.1:{port + i}": {"max_delta": 0.1 * i} for i in range(2)}
        writer, hooks = board("tensorboard", workdir=tmp_path / run)
        writer.write("gate.jsonl", {"step": 1, "max_delta": 0.1, "servers": servers})
        hooks.end("finished")
        events = list(read_events(tmp_path / run / "tensorboard"))
        tags = {value.tag for event in events for value in event.summary.value}
        assert tags == {
            "gate/max_delta", "gate/servers_server_0_max_delta", "gate/servers_server_1_max_delta",
        }  # fmt: skip
        assert str(port) in (tmp_path / run / "gate.jsonl").read_text()


def wandb_records(directory):
    """The records of an offline run: a LevelDB log, in blocks of 32 KiB, of protobuf messages."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = directory.glob("run-*.wandb")
    data, at, parts = path.read_bytes(), 7, []  # after ":W&B" and a version
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts.append(data[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(b"".join(parts))
            parts = []
            yield record


PART = """
import sys
from pathlib import Path
from rlx.observe import writers
name, workdir, step, reason = sys.argv[1:]
((_, hook),) = writers.load([name])
step = int(step)
hook.on_begin({"optimizer": {"learning_rate": 0.5}}, Path(workdir), step)
hook.on_step(step + 1, {"task_reward": 0.5, "staleness_histogram": {"0": 10}})
hook.on_step(step + 2, {"task_reward": 1.0})
hook.on_eval(step, {"greedy_acc": 0.75})  # late, as in a run
hook.on_end(reason)
"""
POINTS = [
    (1, {"reward/task_reward": 0.5}),
    (2, {"reward/task_reward": 1}),
    (0, {"eval/greedy_acc": 0.75}),
    (3, {"reward/task_reward": 0.5}),
    (4, {"reward/task_reward": 1}),
    (2, {"eval/greedy_acc": 0.75}),
]


def write_parts(name, workdir, **variables):
    """Two processes of one run: the first is stopped after step 2, the second goes on to step 4."""
    for step, reason in (("0", "stopped"), ("2", "finished")):
        done = subprocess.run(
            [sys.executable, "-c", PART, name, str(workdir), step, reason],
            capture_output=True, text=True, env={**os.environ, **variables},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr


@pytest.mark.witnesses
@needs["wandb"]
def test_wandb_goes_on_with_its_run_offline(tmp_path):
    write_parts("wandb", tmp_path, WANDB_MODE="offline")
    runs, points, ends = [], [], []
    for directory in sorted((tmp_path / "wandb").glob("offline-run-*"), key=os.path.getmtime):
        for record in wandb_records(directory):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                runs.append((record.run.run_id, record.run.project, record.run.display_name))
                config = {item.key: item.value_json for item in record.run.config.update}
            elif kind == "history":
                items = record.history.item
                found = {i.key or ".".join(i.nested_key): i.value_json for i in items}
                values = {k: float(v) for k, v in found.items() if k[0] != "_"}
                points.append((values.pop("step"), values))
            elif kind == "exit":
                ends.append(record.exit.exit_code)
    assert set(runs) == {((tmp_path / "board_id").read_text(), "rlx", tmp_path.name)}
    assert config["optimizer"] == '{"learning_rate":0.5}'
    assert points == POINTS
    assert ends == [1, 0]


@pytest.mark.witnesses
@needs["wandb"]
def test_wandb_without_a_key_does_not_wait_for_one(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    program = "from rlx.observe import writers; writers.load(['wandb'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert "wandb has no API key; run `wandb login`, or set WANDB_MODE=offline" in last


@pytest.mark.witnesses
@needs["trackio"]
def test_trackio_goes_on_with_its_run_on_this_machine(tmp_path):
    write_parts("trackio", tmp_path, TRACKIO_DIR=str(tmp_path / "trackio"), HF_HUB_OFFLINE="1")
    with sqlite3.connect(tmp_path / "trackio" / "rlx.db") as database:
        rows = list(database.execute("select run_name, step, metrics from metrics order by id"))
    database.close()
    assert {name for name, *_ in rows} == {f"{tmp_path.name}-{(tmp_path / 'board_id').read_text()}"}
    assert [(step, json.loads(values)) for _, step, values in rows] == POINTS


@pytest.mark.witnesses
@needs["mlflow"]
def test_mlflow_goes_on_with_its_run_in_a_local_store(tmp_path):
    store = tmp_path / "store"
    variables = {"MLFLOW_TRACKING_URI": store.as_uri(), "MLFLOW_ALLOW_FILE_STORE": "true"}
    write_parts("mlflow", tmp_path, **variables)
    (tag,) = store.glob("*/*/tags/rlx")
    run = tag.parents[1]
    assert tag.read_text() == (tmp_path / "board_id").read_text()
    assert (run / "params/optimizer.learning_rate").read_text() == "0.5"
    found = []
    for path in (run / "metrics").rglob("*"):
        for line in path.read_text().splitlines() if path.is_file() else ():
            _, value, step = line.split()[:3]
            found.append((int(step), {str(path.relative_to(run / "metrics")): float(value)}))
    assert sorted(found, key=str) == sorted(POINTS, key=str)
    assert "status: 3" in (run / "meta.yaml").read_text(), "FINISHED"


@pytest.mark.witnesses
@needs["mlflow"]
def test_mlflow_without_a_store_says_what_to_set(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    program = (
        "import importlib.util as u; from rlx.observe import writers; find = u.find_spec\n"
        "u.find_spec = lambda name, *_: None if name == 'sqlalchemy' else find(name)\n"
        "writers.load(['mlflow'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path
    )
    assert "MLFLOW_TRACKING_URI is not set; give a server's URL" in done.stderr.splitlines()[-1]


def test_a_run_that_is_begun_anew_is_another_one_on_the_boards(tmp_path):
    first = writers.board_id(tmp_path)
    assert writers.board_id(tmp_path) == first
    assert len(first) == 8


def test_a_missing_package_names_its_extra(monkeypatch):
    monkeypatch.setattr(writers.importlib.util, "find_spec", lambda name: None)
    for name in ("wandb", "trackio", "mlflow"):
        with pytest.raises(
            UserError, match=rf"{name} is not installed; pip install -e '.\[{name}\]'"
        ):
            writers.load([name])


def test_a_writer_of_one_s_own_is_a_class_or_an_object(tmp_path):
    (tmp_path / "my_writers.py").write_text(
        "class Mine:\n    def on_step(self, step, record): pass\n\nmine = Mine()\n\n"
        "class Wants:\n    def __init__(self, path): pass\n\n"
        "class Other:\n    def on_setp(self, step, record): pass\n"
    )
    place = str(tmp_path / "my_writers.py")
    (_, one), (_, other) = writers.load([f"{place}:Mine", f"{place}:mine"])
    assert type(one) is type(other)
    for name, error in (
        ("tensorbord", "unknown observe.writers 'tensorbord'; did you mean 'tensorboard'"),
        (f"{place}:Wants", r"cannot be made: TypeError: .*missing 1 required.*'path'"),
        (f"{place}:Mien", "did you mean 'Mine'"),
    ):
        with pytest.raises(UserError, match=error):
            writers.load([name])
