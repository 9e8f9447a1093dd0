"""Measure a streamed publish to N servers, relayed from server to server and sent by the trainer.

    python -m experiments.bench.relay              # on loopback: the cost in CPU
    python -m experiments.bench.relay --link=200   # as root: hosts with links of 200 Mbit/s
    python -m experiments.bench.relay --link=200 --join --servers=3 --fanouts=0,1

Servers are processes whose engine loads nothing. A publish ends with the last acknowledgement, and
begins with the checksum of the file. Fan-out 0 is the rival: the trainer sends to every server. All
combinations take turns in each round. `--fanouts=1` is a chain.

With `--link`, the trainer and every server have a network namespace of their own. Their bridge
gives each a link of that rate for what it sends. Connections use TLS, as between machines.

With `--join` the last server joins after the others have the weights. Its time, from the address to
the first request that it may get, stands in the table; bytes and CPU seconds are of the join.

Without `--link` all share loopback and the cores, so the time for N servers is at least that of the
CPU for N copies. Then the trainer's bytes and CPU seconds count. Figures are medians [range, from
four rounds on quartiles].
"""

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from experiments.bench.delta import Loading
from experiments.bench.process import median_spread
from rlx import serve
from rlx.fleet.client import Fleet
from rlx.fleet.publish import write_weights
from rlx.fleet.requests import Timeouts
from rlx.fleet.tls import Tls
from rlx.launch.run_secrets import CERTIFICATE, KEY, TOKEN, make_secrets

_NETWORK, _BRIDGE, _PORT = "10.213.0", "rlxbench", 7001


async def publishes(args: argparse.Namespace, addresses: list[str], room: Path) -> None:
    """Print a line of JSON for each publish: servers, fanout, seconds, bytes, CPU seconds."""
    file = room / "weights.safetensors"
    rng = np.random.default_rng(0)
    write_weights({"w": rng.integers(0, 1 << 30, args.megabytes << 18, np.int32)}, file)
    tls = Tls(ca=str(room / CERTIFICATE)) if args.link else None
    token = (room / TOKEN).read_text()
    version = 0
    for round_ in range(bool(args.link), args.rounds + 1):  # round 0 is not counted
        for servers in args.servers:
            for fanout in args.fanouts if servers > 1 else [0]:
                version += 1
                limits = Timeouts(relay_fanout=fanout, probe_seconds=0.1 if args.join else 1.0)
                options = {"token": token, "tls": tls, "limits": limits, "publish_dir": str(room)}
                listed = room / "addresses"
                listed.write_text("\n".join(addresses[: servers - args.join]))
                fleet = Fleet([f"@{listed}"], **options)  # type: ignore[arg-type]
                await fleet.connect()
                begun = time.process_time()
                report = await fleet.publish(version, file, "delta" if args.join else "stream")
                assert len(report.acks) == servers - args.join
                seconds, sent = report.seconds, report.sent_bytes
                if args.join:
                    start, begun = time.monotonic(), time.process_time()
                    listed.write_text("\n".join(addresses[:servers]))
                    while len(fleet.live) < servers:
                        await asyncio.sleep(0.01)
                    seconds = time.monotonic() - start
                    (late,) = {*fleet.live} - {*report.acks}
                    (sent,) = (m.delivery.sent_bytes for m in fleet._members if m.address == late)
                cpu = time.process_time() - begun
                await fleet.close()
                if round_:
                    print(json.dumps([servers, fanout, seconds, sent / 1e6, cpu]), flush=True)


@contextlib.contextmanager
def hosts(count: int, rate: int) -> Iterator[None]:
    """Make network namespaces rlxbench0 … on one bridge, each with a link of `rate` Mbit/s."""

    def run(command: str) -> None:
        subprocess.run(command.split(), check=True, capture_output=True)

    with contextlib.ExitStack() as stack:
        run(f"ip link add {_BRIDGE} type bridge")
        stack.callback(run, f"ip link del {_BRIDGE}")
        run(f"ip link set {_BRIDGE} up")
        for k in range(count):
            host = f"{_BRIDGE}{k}"
            run(f"ip netns add {host}")
            stack.callback(run, f"ip netns del {host}")
            run(f"ip link add {host} type veth peer name eth0 netns {host}")
            run(f"ip link set {host} master {_BRIDGE} up")
            for rest in (
                f"addr add {_NETWORK}.{k + 1}/24 dev eth0", "link set eth0 up", "link set lo up"
            ):  # fmt: skip
                run(f"ip -n {host} {rest}")
            run(
                f"ip netns exec {host} tc qdisc add dev eth0 root "
                f"tbf rate {rate}mbit burst 256kb latency 100ms"
            )
        yield


def place(args: argparse.Namespace, k: int) -> list[str]:
    """Return what stands before a command of host `k`."""
    return ["ip", "netns", "exec", f"{_BRIDGE}{k}"] if args.link else []


@contextlib.contextmanager
def started(args: argparse.Namespace, room: Path) -> Iterator[list[str]]:
    """Run the servers; yield their addresses."""
    own = [sys.executable, "-m", "experiments.bench.relay"]
    env = {**os.environ, "RLX_FLEET_TOKEN": (room / TOKEN).read_text()}
    secure = [f"--tls-cert={room / CERTIFICATE}", f"--tls-key={room / KEY}"]
    processes, addresses = [], []
    try:
        for k in range(1, max(args.servers) + 1):
            host = f"{_NETWORK}.{k + 1}" if args.link else "127.0.0.1"
            flags = [f"--host={host}", f"--port={_PORT + k}", f"--stage-dir={room}", "--model=none"]
            command = [*place(args, k), *own, "--serve", *flags, *(secure if args.link else [])]
            processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, env=env))
            addresses.append(f"{host}:{_PORT + k}")
        yield addresses
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        return serve.main(sys.argv[2:], {"loading": lambda args: Loading()})
    p = argparse.ArgumentParser(allow_abbrev=False)
    p.add_argument("--servers", default="1,2,4,8")
    p.add_argument("--fanouts", default="0,1,2", help="0: the trainer sends to all")
    p.add_argument("--megabytes", type=int, default=256)
    p.add_argument("--link", type=int, default=0, help="Mbit/s of each host; 0: loopback")
    p.add_argument("--join", action="store_true", help="measure a server that joins the others")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--room", default="/dev/shm")
    p.add_argument("--trainer", default="", help=argparse.SUPPRESS)
    args = p.parse_args()
    args.servers = [int(n) for n in args.servers.split(",")]
    args.fanouts = [int(n) for n in args.fanouts.split(",")]
    if args.trainer:
        room, *addresses = args.trainer.split(",")
        return asyncio.run(publishes(args, addresses, Path(room)))
    print(f"{args.megabytes} MiB, load average {os.getloadavg()[0]:.1f}")
    network = hosts(max(args.servers) + 1, args.link) if args.link else contextlib.nullcontext()
    with tempfile.TemporaryDirectory(dir=args.room) as room, network:
        names = [f"{_NETWORK}.{k + 1}" for k in range(max(args.servers) + 1)]
        make_secrets(Path(room), names)
        with started(args, Path(room)) as addresses:
            same = [sys.executable, "-m", "experiments.bench.relay", *sys.argv[1:]]
            trainer = f"--trainer={','.join([room, *addresses])}"
            done = subprocess.run(
                [*place(args, 0), *same, trainer], stdout=subprocess.PIPE, text=True, check=True
            )
    rows: dict[tuple[int, int], list] = {}
    for line in done.stdout.splitlines():
        servers, fanout, *figures = json.loads(line)
        rows.setdefault((servers, fanout), []).append(figures)
    one = float(np.median([seconds for seconds, *_ in rows[args.servers[0], 0]]))
    print(
        "\n| servers | fan-out | seconds | × one server | trainer sent, MB | trainer CPU, s |\n"
        "|---|---|---|---|---|---|"
    )
    for (servers, fanout), figures in rows.items():
        seconds, sent, cpu = zip(*figures, strict=True)
        ratio, mb = np.median(seconds) / one, np.median(sent)
        times, cpus = median_spread(seconds), median_spread(cpu)
        print(f"| {servers} | {fanout} | {times} | {ratio:.2f} | {mb:.0f} | {cpus} |")
    print(f"\nload average at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
