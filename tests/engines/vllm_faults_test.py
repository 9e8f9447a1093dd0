"""vLLM servers that are killed, stopped, sent damaged weights and updated in a hurry.

Every token that comes out is scored by the trainer's decoder under the weights of the version that
it carries, whatever happened on its way.
"""

import asyncio
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import grpc
import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file

from rlx.fleet import publish, wire
from rlx.fleet import rollout_pb2 as pb
from rlx.fleet import rollout_pb2_grpc as rpc
from rlx.fleet.requests import Sampling, Timeouts
from rlx.fleet.scratch import make_private
from rlx.launch.local import CpuPlan, LocalServers
from rlx.model import decoder, hf
from rlx.model.attention import attention
from rlx.model.ops import rms_norm
from rlx.system.process_supervisor import ask_for_stacks
from tests.fixtures.commands import ended
from tests.fixtures.model import logits_of_rows

pytestmark = pytest.mark.vllm

REQUESTS = 64  # in flight at once
SLOTS = 24  # of each of two servers, so that some of them wait
MOST = 160  # tokens of every completion
LENGTH = 192
ATOL = 1e-3  # nats; measured 1e-5
LIMITS = Timeouts(
    connect_seconds=60, request=60, publish_timeout_seconds=30, hang_seconds=1.5,
    probe_seconds=0.1, outage_seconds=90, backoff=0.2,
)  # fmt: skip
HANG_SECONDS = 4.0  # of EngineCore; a stopped server is left alone for longer


class Versions:
    """Weights of every version, each clearly another policy than all the others."""

    def __init__(self, model_dir):
        self.config, _ = hf.load(model_dir)
        self.first = load_file(model_dir / "model.safetensors")
        self.last = 0
        self._params = {}

    def new(self):
        """The next version and its tensors."""
        self.last += 1
        return self.last, self.tensors(self.last)

    def tensors(self, version):
        """The model's own weights, each multiplied by its own draw of 1 ± 0.15."""
        draw = np.random.default_rng(version)
        factors = {k: draw.normal(1, 0.15 * (version > 0), t.shape) for k, t in self.first.items()}
        return {k: (t * factors[k]).astype(np.float32) for k, t in self.first.items()}

    def params(self, version):
        if version not in self._params:
            self._params[version] = hf.from_hf(self.tensors(version), self.config, jnp.float32)
        return self._params[version]


def score(versions, prompts, completions, stamps, kept):
    """Logprobs of each completion's tokens, [T] each, by the trainer's decoder.

    Args:
      stamps: [T] version of each token, one array a completion.
      kept: whether keys and values of earlier tokens are those of their own versions; else
        everything before a token is seen by the version of that token.
    """
    rows, columns = len(completions), LENGTH
    tokens, used = np.zeros((rows, columns), np.int32), np.zeros((rows, columns), np.int32)
    for i, (prompt, completion, stamp) in enumerate(zip(prompts, completions, stamps, strict=True)):
        line = np.concatenate([prompt, completion.tokens])
        tokens[i, : len(line)] = line
        used[i, : len(prompt)] = stamp[0]
        used[i, len(prompt) - 1 : len(line) - 1] = stamp  # who read token k drew token k + 1
    met = np.unique(np.concatenate(stamps)).tolist()
    params = [versions.params(version) for version in met]
    which = np.searchsorted(met, used)
    if kept:
        logprobs = np.asarray(_kept(params, versions.config, tokens, which))
    else:
        each = np.stack([np.asarray(_alone(p, versions.config, tokens)) for p in params])
        logprobs = np.take_along_axis(each, which[None, :, :-1], 0)[0]
    starts = [len(prompt) - 1 for prompt in prompts]
    return [
        row[start : start + len(completion.tokens)]
        for row, start, completion in zip(logprobs, starts, completions, strict=True)
    ]


@jax.jit(static_argnums=1)
def _alone(params, config, tokens):
    """log p of token t + 1 at t, [B, T − 1], by one version."""
    return _next(logits_of_rows(params, config, tokens), tokens)


@jax.jit(static_argnums=1)
def _kept(params, config, tokens, which):
    """As `_alone`, where position t is computed by version params[which[t]], cache and all."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    cos, sin = decoder.rope_tables(config, positions)

    def chosen(values):
        return sum(
            jnp.where((which == v).reshape(which.shape + (1,) * (value.ndim - 2)), value, 0)
            for v, value in enumerate(values)
        )

    x = chosen([decoder.embed(p, tokens, jnp.float32) for p in params])
    for i in range(config.num_layers):
        layers = [jax.tree.map(lambda leaf, i=i: leaf[i], p["layers"]) for p in params]
        qkv = [
            decoder.project_qkv(
                layer, config, rms_norm(x, layer["input_norm"], config.rms_eps), cos, sin
            )
            for layer in layers
        ]
        mixed = attention(
            *(chosen(parts) for parts in zip(*qkv, strict=True)), jnp.ones_like(tokens)
        )

        def attend(*_, mixed=mixed):
            return mixed

        x = chosen([decoder.layer_block(p, config, x, cos, sin, attend)[0] for p in layers])
    logits = [decoder.unembed(p, config, decoder.norm(p, "final_norm", config, x)) for p in params]
    return _next(chosen(logits), tokens)


def _next(logits, tokens):
    logprobs = jax.nn.log_softmax(logits[:, :-1], axis=-1)
    return jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1)[..., 0]


@dataclasses.dataclass
class World:
    """Two servers for all tests of this file, and what was published to them."""

    local: LocalServers
    workdir: Path
    versions: Versions
    said: list

    @asynccontextmanager
    async def fleet(self, wait=True, **options):
        """A connected Fleet of both servers; both alive, unless nobody waits for it."""
        limits = options.pop("limits", LIMITS)
        fleet = self.local.fleet(limits=limits, on_message=self.said.append, **options)
        try:
            await fleet.connect()
            if wait:
                await alive(fleet)
            yield fleet
        finally:
            await fleet.close()

    async def publish(self, fleet, method="path"):
        """The next version to all; returns it."""
        version, tensors = self.versions.new()
        await fleet.publish(version, tensors, method)
        return version

    def engine_core(self, i):
        """Pid of server i's EngineCore."""
        (core,) = psutil.Process(self.local.pids[i]).children()
        return core.pid

    def check(self, load, low, high, kept=False):
        """Every request has its one whole completion, by the versions it says."""
        done = load.done
        assert sorted(done) == list(range(REQUESTS)), "each prompt finishes, and once"
        answers = [done[i] for i in range(REQUESTS)]
        prompts = [prompt_of(i) for i in range(REQUESTS)]
        for answer in answers:
            assert len(answer.tokens) == len(answer.logprobs) == len(answer.versions) == MOST
            assert answer.stop_reason == "length"
            assert answer.versions.min() >= low
            assert answer.versions.max() <= high
            assert (np.diff(answer.versions) >= 0).all()
        stamps = [answer.versions for answer in answers]
        assert_scored(self.versions, prompts, answers, stamps, kept)
        return answers


def assert_scored(versions, prompts, answers, stamps, kept=False):
    wanted = score(versions, prompts, answers, stamps, kept)
    found = [answer.logprobs for answer in answers]
    np.testing.assert_allclose(np.concatenate(found), np.concatenate(wanted), atol=ATOL, rtol=0)


def prompt_of(i):
    return np.random.default_rng(1000 + i).integers(3, 99, 4 + i % 17).astype(np.int32)


class Load:
    """64 requests in flight."""

    def __init__(self, fleet):
        self.fleet = fleet
        self._begin()

    def _begin(self):
        self.done = {}
        self.tasks = [asyncio.create_task(self._one(i)) for i in range(REQUESTS)]

    async def _one(self, i):
        sampling = Sampling(max_new_tokens=MOST, min_new_tokens=MOST)
        (completion,) = await self.fleet.generate(prompt_of(i), sampling, 1)
        assert i not in self.done
        self.done[i] = completion

    async def begun(self, tokens=400):
        """Return when both servers decode, after some tokens of this load.

        The fault must meet all requests in flight. Where one server was slow to begin, as after its
        restart, the other may have finished some: then the load begins anew, with both warm.
        """
        for _ in range(3):
            before = None
            while True:
                servers = [server.status for server in await self.fleet.status()]
                made = sum(server.tokens_generated for server in servers)
                before = made if before is None else before
                if all(server.running for server in servers) and made > before + tokens:
                    break
                if all(task.done() for task in self.tasks):
                    break
                await asyncio.sleep(0.005)
            if not self.done:
                return
            await self.end()
            self._begin()
        raise AssertionError("a server finished before the other one began, three times")

    async def end(self):
        await asyncio.gather(*self.tasks)


async def alive(fleet, count=2):
    while sum(server.live for server in await fleet.status()) != count:
        await asyncio.sleep(0.02)


def run(coroutine, seconds=90):
    asyncio.run(asyncio.wait_for(coroutine, seconds))


@pytest.fixture(scope="module")
def world(tiny_model_dir, tmp_path_factory):
    """Two servers on a core each; when the tests are over nothing of them is left."""
    workdir, said = tmp_path_factory.mktemp("faults"), []
    cores = sorted(os.sched_getaffinity(0))
    local = LocalServers(
        tiny_model_dir, workdir=workdir, plan=CpuPlan(tuple(cores), ((cores[-1],), (cores[0],))),
 max_restarts=100, on_message=said.append, engine="vllm",
        slots=SLOTS, max_model_len=LENGTH, hang_seconds=HANG_SECONDS,
    )  # fmt: skip
    with local:
        local.wait()
        yield World(local, Path(local.directory), Versions(tiny_model_dir), said)
        everyone = [p for pid in local.pids for p in (pid, *children(pid))]
    assert all(ended(pid, 1) for pid in everyone), "a process outlived `stop`"
    assert not Path(local.directory).exists(), "weights were left behind"


def children(pid):
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def test_a_wrong_stamp_is_noticed(world):
    """The check of all others: under another published version almost no token scores the same."""

    async def body():
        async with world.fleet() as fleet:
            first, last = await world.publish(fleet), await world.publish(fleet)
            load = Load(fleet)
            await load.end()
            answers = world.check(load, last, last)
            prompts = [prompt_of(i) for i in range(REQUESTS)]
            right = [answer.versions for answer in answers]
            wrong = [np.full_like(stamp, first) for stamp in right]
            scores = [score(world.versions, prompts, answers, s, False) for s in (right, wrong)]
            distances = np.abs(np.concatenate(scores[0]) - np.concatenate(scores[1]))
            assert (distances > 10 * ATOL).mean() > 0.95
            stamps = [stamp.copy() for stamp in right]
            stamps[5][MOST // 2] = first
            with pytest.raises(AssertionError):
                assert_scored(world.versions, prompts, answers, stamps)

    run(body())


def test_a_killed_server_loses_nothing_and_joins_another_fleet_late_with_its_weights(world):
    limits = dataclasses.replace(LIMITS, connect_seconds=1.0)
    address = world.local.wait()[0]

    async def killed():
        async with world.fleet() as fleet:
            version = await world.publish(fleet)
            load = Load(fleet)
            await load.begun()
            victim, core = world.local.pids[0], world.engine_core(0)
            os.kill(victim, signal.SIGKILL)
            await load.end()
            assert ended(core), "EngineCore outlived its server"
            world.check(load, version, version)

    async def late():
        async with world.fleet(limits=limits, wait=False) as fleet:
            assert f"continuing without {address}" in world.said[-1]
            await world.publish(fleet)
            version = await world.publish(fleet, "delta")
            assert [server.live for server in await fleet.status()] == [False, True]
            joined = 0
            while not joined:  # the load meets the moment at which it joins
                load = Load(fleet)
                await load.end()
                world.check(load, version, version)
                joined = (await fleet.status())[0].status.tokens_generated
            assert [server.status.version for server in await fleet.status()] == [version] * 2

    run(killed())
    run(late())


def test_a_server_ends_with_its_killed_engine_core_and_partial_samples_keep_their_versions(world):
    async def body():
        async with world.fleet(kv_on_update="recompute") as fleet:
            first = await world.publish(fleet)
            load = Load(fleet)
            await load.begun()
            last = await world.publish(fleet)
            victim = world.local.pids[1]
            os.kill(world.engine_core(1), signal.SIGKILL)
            await load.end()
            answers = world.check(load, first, last)
            assert any(set(answer.versions.tolist()) == {first, last} for answer in answers)
            assert ended(victim), "a server without an engine must end"
            await alive(fleet)
            assert [server.status.version for server in await fleet.status()] == [last] * 2

    world.said.clear()
    run(body())
    assert re.search("ended with status 1.*starting it again", " ".join(world.said))


def test_a_stopped_server_is_given_up_after_its_deadline_and_returns_with_what_it_missed(world):
    async def body():
        async with world.fleet() as fleet:
            first = await world.publish(fleet)
            load = Load(fleet)
            await load.begun()
            hung, core = world.local.pids[0], world.engine_core(0)
            os.kill(hung, signal.SIGSTOP)
            os.kill(core, signal.SIGSTOP)
            try:
                await alive(fleet, 1)
                await load.end()
                last = await world.publish(fleet)
            finally:
                os.kill(core, signal.SIGCONT)
                os.kill(hung, signal.SIGCONT)
            world.check(load, first, first)
            await alive(fleet)
            assert world.local.pids[0] == hung, "it was killed, not stopped"
            assert [server.status.version for server in await fleet.status()] == [last] * 2
            load = Load(fleet)
            await load.begun()
            await load.end()
            world.check(load, last, last)

    run(body())


def test_a_hung_engine_core_is_dead_after_a_while(world):
    async def body():
        async with world.fleet() as fleet:
            version = await world.publish(fleet)
            load = Load(fleet)
            await load.begun()
            victim, core = world.local.pids[1], world.engine_core(1)
            ask_for_stacks([core])  # as the server does for one that does not answer
            log = world.local._servers[1].log
            async with asyncio.timeout(20):
                while "in run_busy_loop" not in log.read_text():
                    await asyncio.sleep(0.1)
            os.kill(core, signal.SIGSTOP)
            await load.end()
            world.check(load, version, version)
            assert ended(victim, HANG_SECONDS + 5)
            assert ended(core)
            await alive(fleet)
            assert [server.status.version for server in await fleet.status()] == [version] * 2

    run(body())


def parts(path, version, chunk=1 << 16):
    """The messages of a publish by stream: a header and then at least four chunks."""
    size, crc = os.path.getsize(path), publish.checksum(path)
    header = pb.PublishHeader(version=version, num_bytes=size, crc32=crc)
    chunks = [
        pb.PublishRequest(chunk=pb.PublishChunk(offset=offset, data=data))
        for offset, data in publish.chunks(path, chunk)
    ]
    assert len(chunks) > 3
    return [pb.PublishRequest(header=header), *chunks]


def corrupted(messages):
    data = bytearray(messages[2].chunk.data)
    data[100] ^= 1
    messages[2].chunk.data = bytes(data)
    return messages


def reordered(messages):
    return [messages[0], messages[2], messages[1], *messages[3:]]


def renumbered(messages):
    """As re-ordered, by someone who numbers the chunks in the order in which he sends them."""
    first, second = messages[1].chunk, messages[2].chunk
    first.data, second.data = second.data, first.data
    return messages


def shortened(messages):
    return messages[:-1]


HALF_A_PUBLISH = """
import sys, time
import grpc
from rlx.fleet import rollout_pb2 as pb, rollout_pb2_grpc as rpc

def messages():
    with open(sys.argv[2], "rb") as file:
        while head := file.read(4):
            yield pb.PublishRequest.FromString(file.read(int.from_bytes(head, "little")))
    print("half", flush=True)
    time.sleep(100)

rpc.RolloutStub(grpc.insecure_channel(sys.argv[1])).Publish(
    messages(), timeout=100, metadata=[("authorization", sys.argv[3])]
)
"""


def test_damaged_and_interrupted_publishes_leave_the_old_version_serving(world, tmp_path):
    path, known = str(tmp_path / "next.safetensors"), f"Bearer {world.local.token}"

    async def refused(stub, messages):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Publish(iter(messages), timeout=20)
        assert caught.value.code() is grpc.StatusCode.DATA_LOSS

    async def broken_off(stub, messages):
        sent = asyncio.Event()

        async def half():
            for message in messages[: len(messages) // 2]:
                yield message
            sent.set()
            await asyncio.sleep(100)

        call = stub.Publish(half(), timeout=20)
        await sent.wait()
        call.cancel()

    async def killed(address, messages):
        file = tmp_path / "messages"
        whole = [message.SerializeToString() for message in messages[: len(messages) // 2]]
        file.write_bytes(b"".join(len(m).to_bytes(4, "little") + m for m in whole))
        trainer = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            HALF_A_PUBLISH,
            address,
            str(file),
            known,
            stdout=subprocess.PIPE,
        )
        try:
            assert await trainer.stdout.readline() == b"half\n"
        finally:
            trainer.kill()
            await trainer.wait()

    async def body():
        async with world.fleet() as fleet:
            version = await world.publish(fleet)
            bad, tensors = world.versions.new()
            publish.write_weights(tensors, path)
            load = Load(fleet)
            await load.begun()
            address = world.local.wait()[0]
            async with grpc.aio.insecure_channel(address, options=wire.OPTIONS) as channel:
                stub, metadata = rpc.RolloutStub(channel), (("authorization", known),)
                for name, call in vars(stub).items():
                    setattr(stub, name, partial(call, metadata=metadata))
                for damage in (corrupted, reordered, renumbered, shortened):
                    await refused(stub, damage(parts(path, bad)))
                await broken_off(stub, parts(path, bad))
                await killed(address, parts(path, bad))
                await load.end()
                world.check(load, version, version)
                assert (await stub.Status(pb.StatusRequest())).version == version
                while len(staged := list(world.workdir.glob("rlx-weights-*"))) > 1:
                    await asyncio.sleep(0.02)
                assert [str(file) for file in staged] == [fleet._weights.path]
                again = Load(fleet)
                await again.end()
                world.check(again, version, version)
                await stub.Publish(iter(parts(path, bad)), timeout=20)
                assert (await stub.Status(pb.StatusRequest())).version == bad

    run(body())


def test_requests_wait_while_all_servers_are_dead_and_then_finish(world):
    async def body():
        async with world.fleet() as fleet:
            version = await world.publish(fleet, "stream")
            load = Load(fleet)
            await load.begun()
            os.kill(world.engine_core(0), signal.SIGKILL)
            os.kill(world.local.pids[1], signal.SIGKILL)
            await load.end()
            world.check(load, version, version)

    world.said.clear()
    run(body())
    (told,) = [line for line in world.said if line.startswith("no rollout server alive")]
    assert f"waiting up to {LIMITS.outage_seconds:g} s: 127.0.0.1:" in told


@pytest.mark.parametrize("kv", ["keep", "recompute", "abort"])
@pytest.mark.parametrize("method", ["path", "stream", "delta"])
def test_two_publishes_in_quick_succession(world, kv, method):
    async def body():
        async with world.fleet(kv_on_update=kv) as fleet:
            first = await world.publish(fleet)
            load = Load(fleet)
            await load.begun()
            await asyncio.gather(world.publish(fleet, method), world.publish(fleet, method))
            await load.end()
            answers = world.check(load, first, first + 2, kept=kv == "keep")
            made = np.concatenate([answer.versions for answer in answers])
            assert set(made.tolist()) >= {first, first + 2}
            assert [server.status.version for server in await fleet.status()] == [first + 2] * 2

    run(body())


TRAINER = """
import sys, time
from rlx.launch.local import LocalServers
local = LocalServers(sys.argv[1], workdir=sys.argv[2], engine="vllm", slots=4, max_model_len=64)
local.start().wait()
print(*local.pids, flush=True)
time.sleep(100)
"""


def test_a_killed_trainer_leaves_neither_server_nor_engine_core(tiny_model_dir, tmp_path):
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(tiny_model_dir), str(tmp_path)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        (server,) = (int(word) for word in trainer.stdout.readline().split())
        everyone = [server, *children(server)]
        assert len(everyone) == 2
    finally:
        trainer.kill()
        trainer.communicate()
    assert all(ended(pid) for pid in everyone)


def test_a_server_removes_its_temporary_files_and_those_of_a_killed_one(tiny_model_dir):
    tmp_path = Path(tempfile.mkdtemp(dir="/tmp"))  # a longer path has no room for sockets
    killed, lock = make_private(tmp_path)
    os.close(lock)
    command = [sys.executable, "-m", "rlx.serve", f"--model={tiny_model_dir}", "--engine=vllm"]
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}  # outlasts a server
    server = subprocess.Popen(
        [*command, "--slots=4", "--max-model-len=64", f"--stage-dir={tmp_path}"],
        stdout=subprocess.PIPE, text=True, env={**os.environ, **cache, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    try:
        assert any(line.startswith('{"port"') for line in server.stdout)
        assert len(list(tmp_path.glob("*/*-*"))) > 2, "sockets of vLLM"
        assert not Path(killed).exists()
        server.terminate()
        assert server.wait(60) == 0
        assert {path.name for path in tmp_path.iterdir()} <= {"cache"}
    finally:
        server.kill()
        server.communicate()
        shutil.rmtree(tmp_path)
