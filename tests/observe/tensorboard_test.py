"""Event files are read back record by record, checksums included."""

import math
import os
import struct
import subprocess
import sys

import pytest

from rlx.observe.metrics import MetricsWriter


@pytest.fixture
def read_events():
    """A function from directory to the events of all its files, oldest file first."""
    from rlx.observe.tensorboard import _without_torch

    with _without_torch():
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


def test_scalars_dicts_and_histograms_read_back(tmp_path, read_events):
    with MetricsWriter(tmp_path) as writer:
        writer.write({"step": 3, "task_reward": 0.5, "grad_norm": math.nan, "epoch": 1,
                      "seconds": {"wait": 0.25}, "mine": 2, "staleness_histogram": {0: 10, 2: 30},
                      "note": "text", "reward/mine": 3})  # fmt: skip
        writer.write_eval({"step": 3, "greedy_acc": 0.75, "reward/mine": 4})
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


def test_a_restart_tells_the_board_to_forget(tmp_path, read_events):
    with MetricsWriter(tmp_path) as writer:
        writer.write({"step": 1, "task_reward": 0.0})
    with MetricsWriter(tmp_path, first_step=1) as writer:
        writer.write({"step": 1, "task_reward": 1.0})
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2, "a restart overwrote the file"
    starts = [e.step for e in read_events(tmp_path / "tensorboard") if e.HasField("session_log")]
    assert starts == [1]


def test_the_board_does_not_bring_torch_or_the_terminal_along(tmp_path):
    """tensorboardX imports torch when it finds it: two seconds of every JAX run's start."""
    script = (
        "import sys; from rlx.observe.metrics import MetricsWriter; import rlx.observe.timeline\n"
        "heavy = {'tensorboardX', 'rich', 'matplotlib', 'jax'} & set(sys.modules)\n"
        f"assert not heavy, heavy; MetricsWriter({str(tmp_path)!r}).close()\n"
        "assert 'torch' not in sys.modules and 'tensorboardX' in sys.modules\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)


def test_the_gates_tags_are_the_same_in_every_run(tmp_path, read_events):
    """Ports of servers are new in every run; they stay in gate.jsonl."""
    for run, port in (("a", 40123), ("b", 51999)):
        servers = {f"127.0.0.1:{port + i}": {"max_delta": 0.1 * i} for i in range(2)}
        with MetricsWriter(tmp_path / run) as writer:
            writer.write_gate({"step": 1, "max_delta": 0.1, "servers": servers})
        events = list(read_events(tmp_path / run / "tensorboard"))
        tags = {value.tag for event in events for value in event.summary.value}
        assert tags == {
            "gate/max_delta", "gate/servers_server_0_max_delta", "gate/servers_server_1_max_delta",
        }  # fmt: skip
        assert str(port) in (tmp_path / run / "gate.jsonl").read_text()
