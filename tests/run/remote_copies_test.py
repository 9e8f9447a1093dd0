"""Copies of a run in a real S3 server on this machine, which fails as real ones do."""

import os
import shutil
import subprocess
import time
from concurrent.futures import Future
from functools import partial

import pytest

from rlx.base import UserError
from rlx.config import default
from rlx.run import remote_copies
from rlx.run.remote_copies import COMPLETE, RemoteCopies
from rlx.system.atomic_directory import atomic_directory
from rlx.train import checkpoint
from tests.fixtures.commands import FLOAT32, RLX_MAIN

pytestmark = pytest.mark.witnesses
BUCKET = "s3://runs/of/me"


@pytest.fixture(scope="module")
def server():
    """Start moto's server; yield its address."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    pytest.importorskip("s3fs")
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture
def store(server, monkeypatch):
    """An empty bucket, as fsspec sees it."""
    import fsspec

    named = {
        "AWS_ENDPOINT_URL": server, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
    }  # fmt: skip
    for name, value in named.items():
        monkeypatch.setenv(name, value)
    found = fsspec.filesystem("s3", skip_instance_cache=True)
    found.mkdir("runs")
    yield found
    found.invalidate_cache()
    found.rm("runs", recursive=True)


def config_of(place=BUCKET, **keys):
    config = default()
    config.checkpoint.copy_to, config.export.keep = place, 1
    config.update_from_flattened_dict(keys)
    return config


def save(workdir, step, keep=2):
    def begin(path):
        (path / "state").mkdir()
        (path / "state" / "weights").write_bytes(bytes([step]) * 1000)
        written = Future()
        written.set_result(None)
        return written

    return checkpoint.begin(workdir / "checkpoints", step, begin, 1000, {"step": step}, keep)()


def export(workdir, step):
    path = workdir / "exports" / f"epoch0epochstep{step}globalstep{step}"
    path.parent.mkdir(exist_ok=True)
    with atomic_directory(path) as fresh:
        (fresh / "config.json").write_text(str(step))


def there(store, kind):
    store.invalidate_cache()
    place = f"runs/of/me/one/{kind}"
    found = store.ls(place, detail=False) if store.exists(place) else []
    return sorted(path.rpartition("/")[2] for path in found)


@pytest.fixture
def begun(store, tmp_path):
    """A run in WORKDIR/one, its copies, and the lines that they reported."""
    workdir, said = tmp_path / "one", []
    workdir.mkdir()
    copies = RemoteCopies(config_of(), workdir, said.append)
    copies.fetch()
    copies.on_begin({}, workdir, 0)
    yield workdir, copies, said
    copies.close()


def wait(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def name(step):
    return f"step_{step:08d}"


def test_the_store_has_what_the_workdir_has(store, begun):
    workdir, copies, _ = begun
    (workdir / "metrics.jsonl").write_text('{"step": 1}\n')
    for step in (1, 2, 3):
        export(workdir, step)
        copies.on_checkpoint(step, save(workdir, step))
        marked = f"runs/of/me/one/checkpoints/{name(step)}{COMPLETE}"
        wait(lambda marked=marked: store.invalidate_cache() or store.exists(marked))
    copies.close()
    kept = [name(2), name(2) + COMPLETE, name(3), name(3) + COMPLETE]
    assert there(store, "checkpoints") == kept
    last = "epoch0epochstep3globalstep3"
    assert there(store, "exports") == [last, last + COMPLETE]
    assert store.cat_file("runs/of/me/one/metrics.jsonl") == b'{"step": 1}\n'
    weights = f"runs/of/me/one/checkpoints/{name(3)}/state/weights"
    assert store.cat_file(weights) == bytes([3]) * 1000


def test_an_empty_workdir_gets_the_newest_whole_one(store, begun, tmp_path):
    workdir, copies, said = begun
    (workdir / "metrics.jsonl").write_text('{"step": 3}\n')
    for step in (1, 2, 3):
        save(workdir, step, keep=3)
    copies._keep["checkpoints"] = 3
    copies.close()
    root = "runs/of/me/one/checkpoints"
    store.rm_file(f"{root}/{name(3)}{COMPLETE}")  # as if it had been killed while it copied
    store.pipe_file(f"{root}/{name(2)}/state/weights", b"damaged")
    shutil.rmtree(workdir)
    workdir.mkdir()
    copies.fetch()
    (found,) = checkpoint.checkpoints(workdir / "checkpoints")
    assert (found.name, checkpoint.verify(found)) == (name(1), None)
    assert (workdir / "metrics.jsonl").exists()
    assert not (workdir / "gate.jsonl").exists()
    assert said[-2].startswith(f"skipping damaged copy {BUCKET}/{name(2)}: state/weights has")
    assert said[-1] == f"{name(1)} was fetched from {BUCKET}"
    copies.fetch()  # not again: the run has its own
    assert said[-1] == f"{name(1)} was fetched from {BUCKET}"
    off = RemoteCopies(config_of(**{"checkpoint.recover_mode": "off"}), tmp_path / "one", print)
    off.fetch()
    shutil.rmtree(workdir)
    with pytest.raises(UserError, match="one has checkpoints, and recover_mode=off resumes none"):
        off.fetch()


def test_a_step_saved_again_replaces_its_copy(store, begun):
    workdir, copies, _ = begun
    save(workdir, 1)
    copies._copy()
    path = f"runs/of/me/one/checkpoints/{name(1)}"
    before = store.cat_file(path + COMPLETE)
    copies._copy()
    store.pipe_file(path + COMPLETE, b"another run's")
    store.pipe_file(f"{path}/state/more", b"left over")
    copies._copy()
    store.invalidate_cache()
    assert store.cat_file(path + COMPLETE) == before
    assert not store.exists(f"{path}/state/more")


def test_a_store_that_fails_is_named_and_tried_again(store, begun, monkeypatch):
    workdir, copies, said = begun
    monkeypatch.setattr(remote_copies, "_LONGEST_PAUSE", 0.05)
    put, failing = copies._store.put, [True]

    def broken(*arguments, **options):
        if failing:
            raise FileNotFoundError("the store is away")  # as s3fs says of a bucket
        return put(*arguments, **options)

    monkeypatch.setattr(copies._store, "put", broken)
    copies.on_checkpoint(1, save(workdir, 1))
    wait(lambda: copies.failures > 4)
    failing.clear()
    wait(lambda: name(1) + COMPLETE in there(store, "checkpoints"))
    words = [text for text in said if "cannot copy" in text]
    assert [f"failure {n}:" in text for n, text in zip((1, 2, 4), words, strict=False)] == [
        True
    ] * 3
    assert "failure 4: the store is away; the run goes on" in words[2]
    assert len(words) < 2 + copies.failures.bit_length()  # not each time
    failing.append(True)
    save(workdir, 2)
    begun_at = copies.failures
    copies.close()  # it gives up
    assert copies.failures - begun_at == 3


def test_a_store_that_cannot_be_read_at_the_start_is_an_error(store, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    copies = RemoteCopies(config_of(), tmp_path / "one", print)
    copies._store.retries = 1
    with pytest.raises(UserError, match=r"cannot read checkpoint.copy_to=s3://runs/of/me: .*unset"):
        copies.fetch()
    s3fs.S3FileSystem.clear_instance_cache()


def test_another_place_is_refused(tmp_path):
    pytest.importorskip("fsspec")
    with pytest.raises(UserError, match=r"cannot use checkpoint.copy_to=nowhere://x: .*\[s3\]"):
        RemoteCopies(config_of("nowhere://x"), tmp_path, print)


@pytest.mark.slow
def test_a_run_goes_on_with_an_empty_workdir(store, tmp_path):
    workdir = tmp_path / "one"
    run = partial(
        subprocess.run, check=True, text=True, capture_output=True, env={**os.environ}, timeout=300
    )
    command = [
        *RLX_MAIN, "--config=configs/arithmetic.py", f"--workdir={workdir}", FLOAT32,
        "--config.rollout.batch_prompts=2", "--config.sampling.n_samples=4",
        "--config.sampling.max_new_tokens=24", "--config.fleet.slots=8",
        "--config.eval.num_questions=0", "--config.export.every_steps=2",
        f"--config.checkpoint.copy_to={BUCKET}",
    ]  # fmt: skip
    run([*command, "--config.total_steps=2"])
    assert name(2) + COMPLETE in there(store, "checkpoints")
    assert len(there(store, "exports")) == 2
    shutil.rmtree(workdir)
    again = run([*command, "--config.total_steps=4"])
    assert f"{name(2)} was fetched from {BUCKET}" in again.stdout + again.stderr
    assert "resuming after step 2" in again.stdout + again.stderr
    assert len((workdir / "metrics.jsonl").read_text().splitlines()) == 4
    assert name(4) + COMPLETE in there(store, "checkpoints")
