"""Processes meet, refuse who is not of their run, and notice who is gone, in bounded time."""

import queue
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlx.base import UserError
from rlx.train import hosts
from rlx.train.hosts import Cluster, Hosts, join, relay

SECONDS = 60.0  # limit of waiting for what must happen at once


def of(environ=(), coordinator="", processes=0, process=-1):
    return Cluster.of(dict(environ), coordinator, processes, process, 60.0, 300.0, 1800.0)


def slurm(nodes, index=3, job=123):
    return {"SLURM_STEP_NODELIST": nodes, "SLURM_NTASKS": "4", "SLURM_PROCID": str(index),
            "SLURM_JOB_ID": str(job)}  # fmt: skip


RANKS = {"MASTER_ADDR": "head", "MASTER_PORT": "29500", "WORLD_SIZE": "2", "RANK": "1"}


@pytest.mark.parametrize(
    ("cluster", "wanted"),
    [
        (of(), ("", 1, 0)),
        (of(process=0), ("", 1, 0)),
        (of(coordinator="a:7", processes=2, process=1), ("a:7", 2, 1)),
        (of(slurm("node007")), ("node007:20123", 4, 3)),
        (of(slurm("gpu[07-09,12],x1")), ("gpu07:20123", 4, 3)),
        (of(slurm("a-1,b[2-4]")), ("a-1:20123", 4, 3)),
        (of(slurm("a"), coordinator="b:9"), ("b:9", 4, 3)),
        (of(slurm("a"), processes=1), ("", 1, 0)),
        (of({**slurm("a"), "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}), ("", 1, 0)),
        (of({k: v for k, v in slurm("a").items() if "STEP" not in k}), ("", 1, 0)),  # sbatch's own
        (of(RANKS), ("head:29501", 2, 1)),
        (of({**RANKS, "WORLD_SIZE": "1", "RANK": "0"}), ("", 1, 0)),
        # Kubernetes gives a service called master a variable of this name, in every pod.
        (of({**RANKS, "WORLD_SIZE": "1", "MASTER_PORT": "tcp://10.0.0.1:6379"}), ("", 1, 0)),
        (of({**RANKS, "MASTER_PORT": "tcp://10.0.0.1:6379"}, processes=1), ("", 1, 0)),
        (of({**RANKS, "MASTER_PORT": ""}), ("head:29401", 2, 1)),
        (of({**slurm("a"), "SLURM_NTASKS": ""}), ("", 1, 0)),
        (of({**slurm("a"), "SLURM_JOB_ID": ""}), ("a:20000", 4, 3)),
    ],
)
def test_a_place_comes_from_the_config_or_the_environment(cluster, wanted):
    assert (cluster.coordinator, cluster.count, cluster.index) == wanted


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"coordinator": "a:7", "processes": 2, "process": 2}, "numbered from 0 to 1"),
        ({"coordinator": "a:7", "processes": 2}, "all three keys"),
        ({"coordinator": "a:7", "process": 1}, "all three keys"),
        ({"processes": 2, "process": 1}, "host:port of process 0"),
        ({"coordinator": "a", "processes": 2, "process": 1}, "host:port of process 0"),
        ({"process": 1}, "all three keys"),
        ({"environ": {**RANKS, "MASTER_PORT": "tcp://10.0.0.1:6379"}},
         "MASTER_PORT='tcp://10.0.0.1:6379'"),
        ({"environ": {**RANKS, "MASTER_PORT": "65535"}}, "host:port of process 0"),
        ({"environ": {**RANKS, "WORLD_SIZE": "two"}}, "WORLD_SIZE='two' is no number"),
        ({"environ": {**RANKS, "RANK": "-1"}}, "RANK='-1' is no number"),
        ({"environ": {**slurm("a"), "SLURM_NTASKS": "4.0"}},
         "SLURM_NTASKS='4.0'.*cluster.processes=1"),
    ],
)  # fmt: skip
def test_a_place_that_is_incomplete_or_no_number_is_refused(given, words):
    with pytest.raises(UserError, match=words) as raised:
        of(**given)
    assert "\n" not in str(raised.value)


def test_process_0_says_at_once_for_whom_it_waits_and_why(capsys):
    """Of four tasks of `srun --pty` one is typed into, and runs this alone."""
    step = Cluster.of(slurm("localhost", index=0), f"127.0.0.1:{free_port()}", 0, -1, 60, 0.3, 60)
    with pytest.raises(UserError, match=r"for a single process.*processes=1.*SLURM_NTASKS=4"):
        join(step, {})
    said = capsys.readouterr().err
    assert "waiting up to 0.3 s for the other 3 processes" in said
    assert "--config.cluster.processes=1 (SLURM_STEP_NODELIST=localhost, SLURM_NTASKS=4" in said


def free_port(host="127.0.0.1"):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        return server.getsockname()[1]


def meet(identities, *, indices=None, count=None, timeout=60.0, join_seconds=SECONDS, stray=False):
    """The results of `join`, or what it raises, of each process in a thread; and who was ended."""
    address, ended = f"127.0.0.1:{free_port()}", queue.Queue()
    indices = list(range(len(identities))) if indices is None else indices
    count = count or len(identities)

    def one(index, identity):
        if index and stray:
            _garbage(address)
        cluster = Cluster(address, count, index, timeout, join_seconds)
        try:
            return join(cluster, identity, lambda text: ended.put((index, text)))
        except UserError as error:
            return error

    with ThreadPoolExecutor(len(identities)) as pool:
        return list(pool.map(one, indices, identities)), ended


def leave(*found):
    for each in found:
        each.close()
    for each in found:
        for peer in each._peers:
            peer.cut()  # as the death of its process does


def _garbage(address):
    """Connect as a scanner of ports does, once somebody listens."""
    host, port = address.split(":")
    for _ in range(600):
        try:
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
                return
        except OSError:
            time.sleep(0.05)


def test_processes_meet_and_talk():
    (lead, *others), ended = meet([{"x": 1}] * 3, stray=True)
    lead.send(b"a call" * 100_000)
    assert [each.receive() for each in others] == [b"a call" * 100_000] * 2
    others[0].done()
    others[1].done("it broke")
    lead.failed()
    assert "process 2 of 3 on " in lead.outcome()
    assert lead.outcome().endswith(": it broke")
    assert [each.service.split(":")[0] for each in (lead, *others)] == ["127.0.0.1"] * 3
    asked = threading.Event()
    lead.on_stop = asked.set
    others[1].stop()
    assert asked.wait(SECONDS)
    leave(lead, *others)
    assert ended.empty()


def _has_ipv6():
    try:
        return bool(free_port("::1"))
    except OSError:
        return False


@pytest.mark.skipif(not _has_ipv6(), reason="no IPv6 on this machine")
def test_processes_meet_by_ipv6():
    address = f"[::1]:{free_port('::1')}"
    with ThreadPoolExecutor(2) as pool:
        cluster = (Cluster(address, 2, index, join=SECONDS) for index in range(2))
        lead, other = pool.map(lambda place: join(place, {}), cluster)
    lead.send(b"a call")
    assert other.receive() == b"a call"
    assert lead.service.startswith("[::1]:")
    leave(lead, other)


def test_one_process_needs_no_other():
    alone = join(Cluster(), {})
    alone.close("whatever")
    assert (alone.index, alone.count) == (0, 1)


@pytest.mark.parametrize(
    ("identities", "indices", "words"),
    [
        ([{"config.seed": 1}, {"config.seed": 2}], [0, 1],
         "process 1 of 2 on .* belongs to another run: config.seed: 2 there, 1 on process 0"),
        ([{"a": 1}, {"a": 1, "b": 1}], [0, 1], "b: 1 there, None on process 0"),
        ([{"a": 1, "b": 1}, {"a": 2, "b": 2}], [0, 1], r"a: 2 there, 1 on process 0 \(and 1 more"),
        ([{}, {}, {}], [0, 1, 1], "cluster.process=1, as process 1 of 3 on .* has"),
    ],
)  # fmt: skip
def test_who_is_not_of_this_run_is_refused_on_all_sides(identities, indices, words):
    results, ended = meet(identities, indices=indices)
    for result in results:
        with pytest.raises(UserError, match=words):
            raise result
    assert ended.empty()


def test_a_process_that_counts_more_processes_is_refused():
    address = f"127.0.0.1:{free_port()}"
    with ThreadPoolExecutor(2) as pool:
        two = [pool.submit(join, Cluster(address, *place, join=SECONDS), {})
               for place in ((2, 0), (4, 3))]  # fmt: skip
        for each in two:
            with pytest.raises(UserError, match="processes: 4 there, 2 on process 0"):
                each.result()


def test_waiting_for_processes_has_an_end():
    (lead,), _ = meet([{}], count=3, join_seconds=0.2)
    with pytest.raises(UserError, match="process 1, 2 of 3 did not come"):
        raise lead
    (other,), _ = meet([{}], indices=[1], count=2, join_seconds=0.2)
    with pytest.raises(UserError, match="no process 0 at cluster"):
        raise other


def test_a_taken_port_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(UserError, match=f"cannot listen on cluster.coordinator={address}"):
            join(Cluster(address, 2, 0), {})


def test_a_closed_connection_ends_all_the_others():
    (lead, first, second), ended = meet([{}] * 3)
    second._peers[0].cut()
    found = {}
    while not {0, 1} <= found.keys():
        found.update([ended.get(timeout=SECONDS)])
    assert found[0].startswith("process 2 of 3 on ")
    assert "is lost: " in found[0]
    assert "process 2 of 3 on " in found[1]
    assert "run the same command again" in found[1]
    leave(lead, first, second)


def test_who_has_ended_well_is_not_missed_by_those_still_at_their_last_call():
    before = set(threading.enumerate())
    (lead, other), ended = meet([{}] * 2)
    listening = [t for t in set(threading.enumerate()) - before if "_listen" in t.name]
    lead.send(b"the last call")
    lead.close()
    lead._peers[0].cut()  # as the end of its process does
    for thread in listening:
        thread.join(SECONDS)
    assert other.receive() == b"the last call"
    assert ended.empty()
    leave(other)


def test_who_says_half_a_word_and_stays_is_not_waited_for():
    near, far = socket.socketpair()
    far.sendall(b"\0")  # of the four bytes of a message's length
    with pytest.raises((EOFError, OSError)):
        hosts._Peer.at(near).first_message(0.3)
    far.close()


def test_strangers_who_connect_and_say_nothing_keep_nobody_waiting(monkeypatch):
    """More of them than may be listened to at one time."""
    monkeypatch.setattr(hosts, "_HELLO_SECONDS", 1.0)
    monkeypatch.setattr(hosts, "_MOST_STRANGERS", 40)
    strangers, connected = [], threading.Event()

    def crowd(address):
        while len(strangers) < 60:
            try:
                strangers.append(socket.create_connection(address))
            except OSError:
                time.sleep(0.01)
        connected.set()

    def one(index):
        if index:
            assert connected.wait(SECONDS)
        return join(Cluster(f"127.0.0.1:{port}", 2, index, 60.0, SECONDS), {}, print)

    port, began = free_port(), time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        pool.submit(crowd, ("127.0.0.1", port))
        leave(*pool.map(one, range(2)))
    assert time.monotonic() - began < 30  # one stranger after the other takes 60 s
    for stranger in strangers:
        stranger.close()


def test_a_stop_may_be_asked_for_while_this_very_thread_sends():
    near, far = socket.socketpair()
    peer, ended = hosts._Peer.at(near), queue.Queue()
    other = Hosts(Cluster("x:1", 2, 1), [peer], end=ended.put)
    with peer.lock:  # where a signal's handler may find its thread
        other.stop()
    lead = hosts._Peer.at(far)
    while lead.link.recv_bytes() != hosts._STOP:
        pass
    leave(other)
    assert ended.empty()


def test_a_process_that_does_not_begin_a_call_is_named_while_process_0_is_in_it():
    (lead, other), ended = meet([{}] * 2, timeout=5.0)
    lead.send(b"", "init")
    other.receive()
    other.done()
    lead.finished()
    lead.outcome()
    lead.send(b"", "evaluate")  # process 0 is in it, and the other one never receives it
    found = dict(ended.get(timeout=SECONDS) for _ in range(2))
    assert "process 1 of 2 on " in found[0]
    assert " hangs: it has not begun the call 'evaluate' in " in found[0]
    assert found[1].startswith("process 0 of 2 on ")
    assert " hangs: " in found[1]
    leave(lead, other)


def test_a_relay_keeps_a_connection_whose_other_end_is_gone():
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = relay(f"127.0.0.1:{server.getsockname()[1]}").split(":")
        near = socket.create_connection((host, int(port)))
        far, _ = server.accept()
        near.sendall(b"ping")
        assert far.recv(4) == b"ping"
        far.sendall(b"pong")
        assert near.recv(4) == b"pong"
        far.close()
        near.settimeout(0.3)
        with pytest.raises(TimeoutError):  # not b"", which is the end of a connection
            near.recv(1)
        near.close()


@pytest.mark.parametrize(
    ("names", "listens"),
    [(["127.0.0.2"] * 3, "127.0.0.2"), (["127.0.0.2", "127.0.0.2", "127.0.0.3"], "0.0.0.0")],
)
def test_process_0_listens_where_the_others_reach_it(names, listens):
    """At one address, as of a private network; at any where they know it by several."""
    port = free_port("0.0.0.0")

    def one(index):
        return join(Cluster(f"{names[index]}:{port}", 3, index, join=SECONDS), {})

    with ThreadPoolExecutor(3) as pool:
        lead, *others = pool.map(one, range(3))
    assert lead.service.rpartition(":")[0] == listens
    leave(lead, *others)
