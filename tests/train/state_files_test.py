"""A state comes back bit for bit on any devices and hosts, and takes no second one's memory."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from rlx.base import UserError
from rlx.train import state_files
from tests.fixtures.commands import with_devices
from tests.train import saved_states

SECONDS = 300.0


def run(devices: int, root: Path, *tasks: str, processes: int = 1) -> None:
    """Let processes, joined where there are several, do the tasks."""
    with ExitStack() as stack:
        bound = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        port, meet = (server.getsockname()[1] for server in bound)
    shared = with_devices(devices) | {"MEET": f"127.0.0.1:{meet}"}
    with tempfile.TemporaryFile("w+") as said:  # a pipe that nobody reads would stop its writer
        started = [
            subprocess.Popen(
                [sys.executable, saved_states.__file__, str(root), *tasks],
                start_new_session=True, stdout=said, stderr=subprocess.STDOUT,
                env=shared | ({"PROCESSES": f"{i}/{processes}/{port}"} if processes > 1 else {}),
            )
            for i in range(processes)
        ]  # fmt: skip
        try:
            statuses = [process.wait(SECONDS) for process in started]
        finally:
            for process in started:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        said.seek(0)
        text = said.read()
    print(text)
    assert statuses == [0] * processes, text[-4000:]


@pytest.mark.slow
def test_a_state_is_restored_on_other_devices_meshes_and_hosts(tmp_path):
    for name in ("one", "full", "two", "eight"):
        (tmp_path / name).mkdir()
    saved_states.save(tmp_path / "one", "")
    tasks = "restore=one=fsdp:8", "full=full=fsdp:8", "save=two=fsdp:8", "save=full=fsdp:8"
    run(4, tmp_path, *tasks, processes=2)
    tasks = (
        "restore=two=fsdp:8", "restore=full=fsdp:2,tensor:4", "restore=one=fsdp:4,tensor:2",
        "save=eight=fsdp:8", "restore=eight=fsdp:2,tensor:4",
    )  # fmt: skip
    run(8, tmp_path, *tasks)
    run(4, tmp_path, "restore=eight=fsdp:4", "restore=two=tensor:4")
    for name in ("one", "two", "eight"):
        saved_states.restore(tmp_path / name, "")


def test_a_save_and_a_restore_take_no_second_state(tmp_path):
    run(8, tmp_path, "memory=large=fsdp")


def test_a_save_that_was_given_up_waits_for_no_other_host(tmp_path, monkeypatch):
    """What fails at once on another host leaves no word; host 0 removes the directory."""
    monkeypatch.setattr(state_files.jax, "process_count", lambda: 2)
    with pytest.raises(FileNotFoundError, match="the save was abandoned"):
        state_files._wait_for_others(tmp_path / "gone")


def test_a_host_that_does_not_see_the_directory_says_so(tmp_path):
    with pytest.raises(UserError, match="give a --workdir on storage that all hosts share"):
        state_files.begin(tmp_path / "of another host", {})
