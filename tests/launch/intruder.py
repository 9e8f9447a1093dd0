"""Tries everything a process without the token can do to a run's servers, and prints what worked.

Arguments: the uid to do it as, a server's address, the run's private directory.
"""

import json
import os
import sys
from pathlib import Path

import grpc

from rlx.fleet import rollout_pb2 as pb
from rlx.fleet import rollout_pb2_grpc as rpc

TOKENS = (
    (),
    (("authorization", "Bearer wrong"),),
    (("authorization", "Bearer "),),
    (("authorization", ""),),
)


def calls(stub):
    """Every call of the service by its name, as a function of its metadata."""
    header = pb.PublishHeader(version=1, path="/dev/null")
    for method in pb.DESCRIPTOR.services_by_name["Rollout"].methods:
        message = getattr(pb, method.input_type.name)()
        if method.name == "Publish":
            message.header.CopyFrom(header)
        sent = iter([message]) if method.client_streaming else message

        def call(metadata, method=method, sent=sent):
            answer = getattr(stub, method.name)(sent, metadata=metadata, timeout=20)
            return list(answer) if method.server_streaming else answer

        yield method.name, call


def files(directory):
    """Every way to look into `directory` or to change it."""
    names = ("lock", "weights", "rlx-weights-0.safetensors")
    yield "list", lambda: os.listdir(directory)
    yield "enter", lambda: os.chdir(directory)
    for name in names:
        yield f"read {name}", lambda name=name: (directory / name).read_bytes()
        yield f"write {name}", lambda name=name: (directory / name).write_bytes(b"mine")
        yield f"remove {name}", lambda name=name: (directory / name).unlink()
    yield "add", lambda: (directory / "mine").write_bytes(b"mine")
    yield "link", lambda: os.link("/etc/passwd", directory / "mine")
    yield "rename", lambda: directory.rename(directory.with_name("theirs"))
    yield "remove", lambda: directory.rmdir()
    yield "open up", lambda: directory.chmod(0o777)


def main():
    uid, address, directory = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    if uid != os.getuid():
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    tried, worked = [], []
    with grpc.insecure_channel(address) as channel:
        for metadata in TOKENS:
            for name, call in calls(rpc.RolloutStub(channel)):
                tried.append(name)
                try:
                    call(metadata)
                    worked.append(name)
                except grpc.RpcError as error:
                    if error.code() is not grpc.StatusCode.UNAUTHENTICATED:
                        worked.append(f"{name}: {error.code().name} {error.details()}")
    if uid != 0 and uid != os.stat(directory).st_uid:
        for name, action in files(directory):
            tried.append(name)
            try:
                action()
                worked.append(name)
            except PermissionError:
                continue
            except OSError as error:  # it got as far as to learn something
                worked.append(f"{name}: {type(error).__name__}")
    print(json.dumps({"tried": tried, "worked": worked}))


main()
