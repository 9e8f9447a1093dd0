"""Publishing by adapter over real gRPC: what engines get is the base plus scale·B·A, or nothing."""

import asyncio
import dataclasses
import time
import tracemalloc
import zlib

import grpc
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rlx.base import UserError
from rlx.engines.jax.jax_engine import JaxEngine
from rlx.fleet import adapter, publish
from rlx.fleet import rollout_pb2 as pb
from rlx.fleet.client import Fleet
from rlx.fleet.publish import Adapter
from rlx.fleet.requests import Request, Sampling
from rlx.model import directory, hf, lora, peft
from rlx.model import params as parameters
from rlx.model.lora_config import LoraConfig

CODE = grpc.StatusCode
NAMES = ("model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj")
IN, OUT, RANK = 24, 40, 3


def base_tensors(seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    tensors = {f"{name}.weight": rng.standard_normal((OUT, IN)).astype(dtype) for name in NAMES}
    return {**tensors, "model.norm.weight": rng.standard_normal(IN).astype(dtype)}


def adapter_tensors(seed=1, names=NAMES[:1]):
    rng, tensors = np.random.default_rng(seed), {}
    for name in names:
        for part, shape in (("lora_A", (RANK, IN)), ("lora_B", (OUT, RANK))):
            values = rng.standard_normal(shape).astype(np.float32)
            tensors[f"base_model.model.{name}.{part}.weight"] = values
    return tensors


def wanted(base, tensors, scale, dtype):
    """The sum in float64, rounded once."""
    made = {name: value.astype(np.float64) for name, value in base.items()}
    for name in NAMES:
        a, b = (f"base_model.model.{name}.lora_{x}.weight" for x in "AB")
        if a in tensors:
            change = tensors[b].astype(np.float64) @ tensors[a].astype(np.float64)
            made[f"{name}.weight"] += scale * change
    return {name: value.astype(dtype) for name, value in made.items()}


@pytest.fixture
def model_dir(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    save_file(base_tensors(), path / "model.safetensors")
    return path


def recording(arithmetic):
    """An engine that keeps what it is given, and takes any tensors that are finite."""

    class Recording(arithmetic.ArithmeticEngine):
        given = None

        async def load(self, path, version, kv="keep"):
            tensors = await asyncio.to_thread(load_file, path)
            if not all(np.isfinite(value.astype(np.float32)).all() for value in tensors.values()):
                raise ValueError("a weight is not finite")
            self.given, self.version = tensors, version
            return 1

    return Recording()


def staged(directory):
    return list(directory.glob("rlx-weights-*"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_servers_add_the_adapter_to_their_base(dtype, tools, arithmetic, model_dir, tmp_path):
    engines = [recording(arithmetic) for _ in range(2)]
    sent = Adapter(adapter_tensors(), 0.7, dtype, adapter.digest(model_dir))

    async def main():
        options = {"model_dir": str(model_dir)}
        async with tools.fleet(2, tmp_path, engines, **options) as (fleet, _, _):
            report = await fleet.publish(4, sent, "adapter")
            assert [each.method for each in report.deliveries] == ["adapter"] * 2
            assert report.sent_bytes == 2 * report.num_bytes
            assert len(staged(tmp_path)) == 1  # the trainer's own, of the adapter
            assert (await fleet.generate([1, 2], Sampling(seed=1), 1))[0].versions[0] == 4

    tools.run(main())
    assert not staged(tmp_path)
    kind = np.dtype(dtype)
    for engine in engines:
        assert engine.version == 4
        want = wanted(base_tensors(), sent.tensors, 0.7, kind)
        assert engine.given.keys() == want.keys()
        for name, value in want.items():
            got = engine.given[name]
            assert got.dtype == kind
            step = 1e-6 if dtype == "float32" else 2.0**-7
            np.testing.assert_allclose(
                got.astype(np.float64), value.astype(np.float64), rtol=step, atol=step
            )
        untouched = f"{NAMES[1]}.weight"
        np.testing.assert_array_equal(engine.given[untouched], want[untouched])


def test_the_deadline_of_an_adapter_counts_its_base(
    tools, arithmetic, model_dir, tmp_path, monkeypatch
):
    """A server reads and writes all of that, which takes far longer than a few matrices."""
    require = adapter.Base.require
    monkeypatch.setattr(adapter.Base, "require", lambda *a: time.sleep(1.0) or require(*a))
    sent = Adapter(adapter_tensors(), 0.7, "float32", adapter.digest(model_dir), 1 << 30)
    limits = dataclasses.replace(tools.limits, publish_timeout_seconds=0.3)
    engine = recording(arithmetic)

    async def main():
        options = {"limits": limits, "model_dir": str(model_dir)}
        async with tools.fleet(1, tmp_path, [engine], **options) as (fleet, _, _):
            await asyncio.wait_for(fleet.publish(4, sent, "adapter"), 15)

    tools.run(main())
    assert engine.version == 4


def test_each_publish_begins_with_the_base_again(tools, arithmetic, model_dir, tmp_path):
    """Adapters replace each other; they do not add up."""
    engine = recording(arithmetic)
    digest = adapter.digest(model_dir)

    async def main():
        options = {"model_dir": str(model_dir)}
        async with tools.fleet(1, tmp_path, [engine], **options) as (fleet, _, _):
            for version in (1, 2):
                sent = Adapter(adapter_tensors(version), 1.0, "float32", digest)
                await fleet.publish(version, sent, "adapter")

    tools.run(main())
    want = wanted(base_tensors(), adapter_tensors(2), 1.0, np.float32)
    for name, value in want.items():
        np.testing.assert_allclose(engine.given[name], value, rtol=1e-6, atol=1e-6)


def test_a_server_of_another_base_refuses_and_takes_a_stream(
    tools, arithmetic, model_dir, tmp_path
):
    engine = recording(arithmetic)
    sent = Adapter(adapter_tensors(), 1.0, "float32", b"\1" * 32)

    async def main():
        options = {"model_dir": str(model_dir)}
        async with tools.fleet(1, tmp_path, [engine], **options) as (fleet, _, _):
            with pytest.raises(UserError, match=r"belongs to base 010101010101, .*publish=stream"):
                await fleet.publish(1, sent, "adapter")
            assert engine.version == 0
            assert not staged(tmp_path)
            report = await fleet.publish(2, base_tensors(), "stream")
            assert [each.method for each in report.deliveries] == ["stream"]

    tools.run(main())


def test_a_server_that_returns_gets_the_adapter(tools, arithmetic, model_dir, tmp_path):
    first, second = recording(arithmetic), recording(arithmetic)
    sent = Adapter(adapter_tensors(), 1.0, "float32", adapter.digest(model_dir))
    options = {"model_dir": str(model_dir), "stage_dir": str(tmp_path)}

    async def main():
        async with tools.server(first, **options) as (_, server):
            port = server.port
            fleet = Fleet([f"127.0.0.1:{port}"], limits=tools.limits, publish_dir=str(tmp_path))
            await fleet.connect()
            await fleet.publish(3, sent, "adapter")
        async with tools.server(second, port=port, **options):
            drawn = await fleet.generate([1], Sampling(seed=1, max_new_tokens=3), 1)
            assert set(drawn[0].versions.tolist()) == {3}
            await fleet.close()

    tools.run(main())
    assert all(np.array_equal(first.given[name], second.given[name]) for name in first.given)


# Publishes that cannot work.


def messages(tensors, directory, **fields):
    """A publish by adapter; `data` replaces the bytes, the others are fields of the adapter's."""
    path = directory / "sent"
    save_file(tensors, path)
    data = fields.pop("data", path.read_bytes())
    crc = fields.pop("crc32", zlib.crc32(data))
    header = pb.PublishHeader(version=1, num_bytes=len(data), crc32=crc)
    for name, value in {"scale": 1.0, "dtype": "float32", **fields}.items():
        setattr(header.adapter, name, value)
    yield pb.PublishRequest(header=header)
    yield pb.PublishRequest(chunk=pb.PublishChunk(offset=0, data=data))


def changed(**changes):
    made = adapter_tensors()
    for part, value in changes.items():
        made[f"base_model.model.{NAMES[0]}.{part}.weight"] = value
    return made


HALF = dict(list(adapter_tensors().items())[:1])
CASES = {
    "another base": ({}, {"base": b"x"}, CODE.FAILED_PRECONDITION, "belongs to base"),
    "half a pair": (HALF, {}, CODE.INVALID_ARGUMENT, "lora_B.weight is missing"),
    "no such target": (
        adapter_tensors(names=["model.layers.9.mlp.up_proj"]), {}, CODE.INVALID_ARGUMENT,
        "model.layers.9.mlp.up_proj.weight is missing",
    ),
    "a norm": (
        adapter_tensors(names=["model.norm"]), {}, CODE.INVALID_ARGUMENT, "do not fit model.norm",
    ),
    "no adapter": (base_tensors(), {}, CODE.INVALID_ARGUMENT, "is not part of an adapter"),
    "another rank": (
        changed(lora_A=np.ones((RANK + 1, IN), np.float32)), {}, CODE.INVALID_ARGUMENT,
        "of shapes (4, 24) and (40, 3) do not fit",
    ),
    "another width": (
        changed(lora_A=np.ones((RANK, IN - 1), np.float32)), {}, CODE.INVALID_ARGUMENT,
        "do not fit",
    ),
    "other numbers": (
        changed(lora_A=np.ones((RANK, IN), np.int32)), {}, CODE.INVALID_ARGUMENT, "not float32",
    ),
    "an unknown dtype": ({}, {"dtype": "int8"}, CODE.INVALID_ARGUMENT, "dtype='int8'"),
    "no scale": ({}, {"scale": float("nan")}, CODE.INVALID_ARGUMENT, "scale=nan"),
    "no safetensors": ({}, {"data": b"x" * 99}, CODE.INVALID_ARGUMENT, "not a safetensors file"),
    "damaged": ({}, {"crc32": 7}, CODE.DATA_LOSS, "checksum"),
    "not finite": (
        changed(lora_A=np.full((RANK, IN), np.inf, np.float32)), {}, CODE.FAILED_PRECONDITION,
        "not finite",
    ),
}  # fmt: skip


def test_what_is_no_adapter_of_the_base_changes_nothing(tools, arithmetic, model_dir, tmp_path):
    engine, digest = recording(arithmetic), adapter.digest(model_dir)
    options = {"model_dir": str(model_dir), "stage_dir": str(tmp_path)}

    async def main():
        async with tools.server(engine, **options) as (_, server), tools.stub(server) as stub:
            for name, (tensors, fields, code, words) in CASES.items():
                sent = messages(tensors or adapter_tensors(), tmp_path, **{"base": digest} | fields)
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await stub.Publish(sent, timeout=10)
                assert error.value.code() == code, (name, error.value.details())
                assert words in error.value.details(), name
                assert engine.version == 0
                assert not staged(tmp_path), name

    tools.run(main())


def test_a_server_without_a_model_directory_takes_none(tools, arithmetic, tmp_path):
    async def main():
        options = {"stage_dir": str(tmp_path)}
        engine = recording(arithmetic)
        async with tools.server(engine, **options) as (_, server), tools.stub(server) as stub:
            with pytest.raises(grpc.aio.AioRpcError, match="no base for adapters"):
                await stub.Publish(messages(adapter_tensors(), tmp_path), timeout=10)

    tools.run(main())


def test_an_adapter_goes_by_its_own_method_alone(tmp_path):
    made = Adapter(adapter_tensors(), 1.0, "float32", b"")
    with pytest.raises(ValueError, match="Adapter cannot be published by stream"):
        publish.stage(1, made, "stream", tmp_path)
    with pytest.raises(ValueError, match="dict cannot be published by adapter"):
        publish.stage(1, base_tensors(), "adapter", tmp_path)
    assert not staged(tmp_path)


# The base.


def test_the_digest_is_of_the_tensors_not_of_the_files(tmp_path):
    names = {}

    def digest_of(name, *files):
        path = tmp_path / name
        path.mkdir()
        for index, tensors in enumerate(files):
            file = "model.safetensors" if len(files) == 1 else f"part-{index}.safetensors"
            save_file(tensors, path / file)
            names.update(dict.fromkeys(tensors, file))
        if len(files) > 1:
            (path / "model.safetensors.index.json").write_text(
                '{"weight_map": ' + str(names).replace("'", '"') + "}"
            )
        return adapter.digest(path)

    tensors = base_tensors()
    halves = list(tensors.items())
    whole = digest_of("whole", tensors)
    assert digest_of("divided", dict(halves[:1]), dict(halves[1:])) == whole
    first, *_ = tensors
    bit = tensors[first].copy()
    bit.view(np.uint32)[-1, -1] ^= 1
    others = [
        tensors | {first: bit},
        tensors | {first: tensors[first].reshape(IN, OUT)},
        tensors | {first: tensors[first].view(np.int32)},
        {f"{name}x": value for name, value in tensors.items()},
        dict(halves[1:]),
    ]
    digests = {digest_of(f"other{index}", each) for index, each in enumerate(others)}
    assert len({whole, *digests}) == 1 + len(others)


def test_a_base_may_be_given_by_its_name(tmp_path):
    """A server of a hub name refused every adapter, as if it had no weights."""
    place = directory.resolve("rlx:arithmetic")
    base = adapter.Base("rlx:arithmetic")
    base.require(adapter.digest(place))
    (tmp_path / "out").touch()
    publish.write_weights({}, tmp_path / "none")
    base.write(tmp_path / "none", 1.0, "float32", tmp_path / "out")
    assert load_file(tmp_path / "out").keys() == load_file(place / "model.safetensors").keys()


def test_a_base_that_changes_on_disk_is_read_again(model_dir):
    base, before = adapter.Base(model_dir), adapter.digest(model_dir)
    base.require(before)
    save_file(base_tensors(seed=5), model_dir / "new")
    (model_dir / "new").replace(model_dir / "model.safetensors")
    with pytest.raises(adapter.OtherBase):
        base.require(before)
    base.require(adapter.digest(model_dir))


def test_memory_is_that_of_a_few_tensors(tmp_path):
    size, count = 512, 24  # 1 MiB each
    base = {f"w{i}.weight": np.ones((size, size), np.float32) for i in range(count)}
    parts = {
        f"base_model.model.w{i}.lora_{x}.weight": np.ones(shape, np.float32)
        for i in range(count)
        for x, shape in (("A", (2, size)), ("B", (size, 2)))
    }
    save_file(base, tmp_path / "model.safetensors")
    save_file(parts, tmp_path / "adapter")
    (tmp_path / "out").touch()
    tracemalloc.start()
    try:
        adapter.Base(tmp_path).write(tmp_path / "adapter", 0.5, "float32", tmp_path / "out")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20
    assert all((value == 2.0).all() for value in load_file(tmp_path / "out").values())


# Real engines.


def trained(model, dtype):
    """An adapter of `model`'s, and the whole weights that the trainer would publish."""
    config, params = hf.load(model)
    settings = LoraConfig(4, 8.0)
    rows = lora.table(config, settings)
    leaves, tree = jax.tree.flatten(parameters.shapes(config, rows=rows))
    keys = jax.random.split(jax.random.key(2), len(leaves))
    adapters = tree.unflatten(
        [0.05 * jax.random.normal(k, each.shape) for k, each in zip(keys, leaves, strict=True)]
    )
    tensors = peft.to_peft(adapters, config, settings).arrays()
    sent = Adapter(tensors, settings.scale, dtype, adapter.digest(model))
    kind = np.dtype(dtype)
    return sent, hf.to_hf(lora.merge(params, adapters, settings), config, kind)


def test_the_jax_engine_takes_an_adapter_as_it_takes_the_merged_file(
    tools, tiny_model_dir, tmp_path
):
    engine = JaxEngine(str(tiny_model_dir), slots=2, max_model_len=48, decode_steps=4)
    sent, merged = trained(tiny_model_dir, "float32")

    async def logprobs():
        sampling = Sampling(temperature=0.0, max_new_tokens=12, min_new_tokens=12)
        request = Request("r", np.asarray([3, 17, 44], np.int32), sampling)
        return np.concatenate([c.logprobs async for c in engine.generate(request)])

    async def main():
        options = {"model_dir": str(tiny_model_dir)}
        async with tools.fleet(1, tmp_path, [engine], **options) as (fleet, _, _):
            before = await logprobs()
            whole = await fleet.publish(1, merged, "stream")
            by_stream = await logprobs()
            report = await fleet.publish(2, sent, "adapter")
            assert report.sent_bytes < 0.3 * whole.sent_bytes
            np.testing.assert_allclose(await logprobs(), by_stream, atol=1e-5)
            assert np.abs(by_stream - before).max() > 1e-2

    tools.run(main(), 120)


@pytest.mark.vllm
def test_vllm_takes_an_adapter_as_it_takes_the_merged_file(vllm_servers):
    sent, merged = trained(hf.resolve("rlx:arithmetic"), "bfloat16")
    greedy = Sampling(temperature=0.0, max_new_tokens=16, min_new_tokens=16)

    async def main():
        fleet, drawn = vllm_servers.fleet(), []
        try:
            await fleet.connect()
            drawn.append((await fleet.generate([1, 2, 3], greedy, 1))[0].logprobs)
            for version, source, method in ((1, merged, "stream"), (2, sent, "adapter")):
                report = await fleet.publish(version, source, method)
                assert [each.method for each in report.deliveries] == [method]
                completion = (await fleet.generate([1, 2, 3], greedy, 1))[0]
                assert set(completion.versions.tolist()) == {version}
                drawn.append(completion.logprobs)
            return drawn
        finally:
            await fleet.close()

    before, by_stream, by_adapter = asyncio.run(main())
    assert np.abs(by_stream - before).max() > 0.05
    np.testing.assert_allclose(by_adapter[:4], by_stream[:4], atol=0.05)
