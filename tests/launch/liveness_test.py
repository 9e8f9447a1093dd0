"""How long a server has been silent, and what counts as an answer."""

import sys
import time
from pathlib import Path

import pytest

from rlx.launch.liveness import LivenessProbe
from rlx.launch.local import LocalServers

SCRIPT = str(Path(__file__).parents[1] / "fixtures" / "arithmetic_engine.py")


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def poll():
    """poll(port, token, seconds): a probe, polled until it answers or so long by its own clock."""
    probes = []

    def make(port, token, seconds):
        clock = Clock()
        probe = LivenessProbe(port, token, clock=clock)
        probes.append(probe)
        for _ in range(round(seconds * 10)):
            clock.now += 0.1
            probe.poll()
            if probe.answered:
                break
            time.sleep(0.002)
        return probe, clock

    yield make
    for probe in probes:
        probe.close()


def test_nobody_there_is_silence(poll):
    probe, _ = poll(1, None, 20)
    assert not probe.answered
    assert probe.silent == pytest.approx(20)


def test_time_in_which_nobody_polled_does_not_count(poll):
    """A trainer that was stopped for an hour must not kill its servers when it goes on."""
    probe, clock = poll(1, None, 1)
    clock.now += 3600
    probe.poll()
    assert probe.silent < 2


@pytest.mark.parametrize("token", ["right", "wrong", None])
def test_an_answer_ends_the_silence_and_so_does_a_refusal_for_want_of_a_token(
    poll, tmp_path, token
):
    local = LocalServers("none", workdir=tmp_path, command=(sys.executable, SCRIPT), token="right")
    with local:
        (address,) = local.wait()
        probe, _ = poll(int(address.split(":")[1]), token, 300)
    assert probe.answered
    assert probe.silent == 0
