"""How long a server has been silent, and what counts as an answer."""

import sys
import time
from pathlib import Path

import pytest

from rlx.launch.liveness import Pulse
from rlx.launch.local import LocalServers

SCRIPT = str(Path(__file__).parents[1] / "fixtures" / "arithmetic_engine.py")


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def feel():
    """feel(port, token, seconds): a pulse felt until it beats, or so long by a clock of its own."""
    pulses = []

    def make(port, token, seconds):
        clock = Clock()
        pulse = Pulse(port, token, clock=clock)
        pulses.append(pulse)
        for _ in range(round(seconds * 10)):
            clock.now += 0.1
            pulse.feel()
            if pulse.answered:
                break
            time.sleep(0.002)
        return pulse, clock

    yield make
    for pulse in pulses:
        pulse.close()


def test_nobody_there_is_silence(feel):
    pulse, _ = feel(1, None, 20)
    assert not pulse.answered
    assert pulse.silent == pytest.approx(20)


def test_time_in_which_nobody_felt_it_does_not_count(feel):
    """A trainer that was stopped for an hour must not kill its servers when it goes on."""
    pulse, clock = feel(1, None, 1)
    clock.now += 3600
    pulse.feel()
    assert pulse.silent < 2


@pytest.mark.parametrize("token", ["right", "wrong", None])
def test_an_answer_ends_the_silence_and_so_does_a_refusal_for_want_of_a_token(
    feel, tmp_path, token
):
    local = LocalServers("none", workdir=tmp_path, command=(sys.executable, SCRIPT), token="right")
    with local:
        (address,) = local.wait()
        pulse, _ = feel(int(address.split(":")[1]), token, 300)
    assert pulse.answered
    assert pulse.silent == 0
