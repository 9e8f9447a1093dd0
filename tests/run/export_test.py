"""Weights handed from the trainer's thread to the one that publishes them, bucket by bucket."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from safetensors.numpy import load_file

from rlx.algorithms.presets import PRESETS
from rlx.base import UserError
from rlx.fleet import publish
from rlx.fleet.publish import Adapter
from rlx.model.lora_config import LoraConfig
from rlx.model.tensors import Buckets
from rlx.run.export import AHEAD, Export, computed
from rlx.train.train_options import TrainOptions

NAMES = [f"w{i}" for i in range(8)]


class Trainer:
    """What of a trainer `Export` asks: tensors of float32, one a bucket; some counted."""

    def __init__(self, fails_at=None):
        self.fails_at, self.asked, self.most, self.alive = fails_at, [], 0, weakref.WeakSet()

    def weights(self, state, adapters=False):
        return Buckets({n: np.zeros(1000, np.float32) for n in NAMES}, self._buckets(state))

    def _buckets(self, state):
        for name in NAMES:
            if name == self.fails_at:
                raise MemoryError("the device is full")
            tensor = _Tensor(state)
            self.alive.add(tensor)
            self.asked.append(name)
            self.most = max(self.most, len(self.alive))
            yield {name: tensor}
            del tensor


class _Tensor:
    """A tensor on a device."""

    shape, dtype = (1000,), np.dtype(np.float32)

    def __init__(self, state):
        self._state = state

    def __array__(self, dtype=None, copy=None):
        return np.full(self.shape, self._state, self.dtype)


@pytest.fixture
def thread():
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.fixture
def export(tmp_path):
    options = TrainOptions(PRESETS["grpo"])
    return lambda trainer: Export(options, "path", trainer, tmp_path, tmp_path)


def test_no_more_than_two_buckets_are_alive_on_the_way(export, thread, tmp_path):
    trainer = Trainer()

    def send(weights):
        assert not trainer.asked  # nothing is computed before somebody takes it
        return thread.submit(lambda: publish.stage(1, computed(weights), "stream", tmp_path))

    staged = export(trainer).publish(7.0, send).result()
    gc.collect()
    assert (trainer.asked, trainer.most, len(trainer.alive)) == (NAMES, AHEAD, 0)
    assert set(load_file(staged.path)) == set(NAMES)
    assert all((tensor == 7).all() for tensor in load_file(staged.path).values())
    assert publish.checksum(staged.path) == staged.crc32
    staged.close()


def test_the_first_bucket_is_waited_for_and_the_others_are_not():
    read = []

    class Tensor(_Tensor):
        def __array__(self, dtype=None, copy=None):
            read.append(self._state)
            return super().__array__(dtype, copy)

    def made():
        return Buckets({}, ({str(n): Tensor(n)} for n in range(3)))

    assert [*map(list, computed(made()))] == [["0"], ["1"], ["2"]]
    assert read == [0]
    sent = computed(publish.Adapter(made(), 0.5, "float32", b"base"))
    assert read == [0, 0]
    assert (sent.scale, [*map(list, sent.tensors)]) == (0.5, [["0"], ["1"], ["2"]])


def test_a_trainer_that_fails_half_way_leaves_nothing_to_be_published(export, thread, tmp_path):
    def send(weights):
        sent.append(thread.submit(publish.stage, 1, weights, "path", tmp_path))
        return sent[0]

    sent = []
    with pytest.raises(MemoryError):
        export(Trainer("w5")).publish(1.0, send)
    with pytest.raises(ValueError, match="w5 did not come"):
        sent[0].result()
    assert not list(tmp_path.iterdir())


def test_a_publish_that_fails_is_not_waited_for(export, thread, tmp_path):
    trainer = Trainer()

    def send(weights):
        return thread.submit(publish.stage, 1, weights, "path", tmp_path / "missing")

    sent = export(trainer).publish(1.0, send)
    assert len(trainer.asked) <= AHEAD
    with pytest.raises(UserError, match="cannot write weights"):
        sent.result()


def test_adapters_are_handed_over_with_what_servers_need(tmp_path, thread, monkeypatch):
    options = TrainOptions(PRESETS["grpo"], lora=LoraConfig(4, 8.0))
    monkeypatch.setattr("rlx.fleet.adapter.digest", lambda directory: b"base")
    seen = []

    def send(weights):
        seen.append(weights)
        return thread.submit(publish.stage, 1, weights, "adapter", tmp_path)

    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    export = Export(options, "adapter", Trainer(), tmp_path, tmp_path)
    staged = export.publish(3.0, send).result()
    assert isinstance(seen[0], Adapter)
    assert (staged.adapter.scale, staged.adapter.base) == (2.0, b"base")
    assert staged.work_bytes == staged.num_bytes + 1000
    assert set(load_file(staged.path)) == set(NAMES)
    staged.close()
