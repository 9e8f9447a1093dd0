"""The first signal asks, and has a deadline unless it is Ctrl-C."""

import os
import signal
import time
from threading import Event

import pytest

from rlx.system.signals import interrupts


@pytest.mark.parametrize(
    ("number", "limited"), [(signal.SIGTERM, True), (signal.SIGUSR1, True), (signal.SIGINT, False)]
)
def test_who_sends_a_signal_other_than_ctrl_c_kills_later(number, limited):
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)}
    asked, late = Event(), Event()
    with interrupts(asked.set, late=late.set, seconds=0.2):
        os.kill(os.getpid(), number)
        assert asked.wait(20)
        assert late.wait(20 if limited else 0.5) == limited
    assert {each: signal.getsignal(each) for each in before} == before


def test_a_block_that_ends_in_time_has_no_deadline():
    asked, late = Event(), Event()
    with interrupts(asked.set, late=late.set, seconds=0.5):
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked.wait(20)
    time.sleep(0.7)
    assert not late.is_set()
