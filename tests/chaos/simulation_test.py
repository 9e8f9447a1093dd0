"""Simulated runs with faults: rlx passes, and broken versions of it are found."""

from contextlib import ExitStack
from unittest import mock

import pytest

from experiments.chaos import network, simulation
from experiments.chaos.simulation import Fault, Schedule
from rlx.fleet import sample, wire
from rlx.journal import history
from rlx.rollout import staleness
from rlx.rollout.staleness import Limits

CAPACITY, RESUME, RECEIVE = staleness.capacity, staleness.resume, network.Call.receive
REQUEST, AFTER = sample.GenerateCall.request, history._State.after
asked = {}  # request_id → samples


def remember(call, samples):
    request = REQUEST(call, samples)
    asked[request.request_id] = samples
    return request


def receive_late(call, reply):
    if not call.over or not hasattr(reply, "stop_reason"):
        return RECEIVE(call, reply)
    for chunk in wire.chunks_from(reply):
        asked[call._request.request_id][chunk.index - call._request.first_index].add(chunk)


MUTANTS = {
    "one prompt more than the capacity is admitted": [
        (staleness, "capacity", lambda state, limits: CAPACITY(state, limits) + 1),
    ],
    "accepted groups are not restored": [
        (staleness, "resume", lambda step, buffered, limits: RESUME(step, 0, limits)),
    ],
    "an answer counts although its server was given up": [
        (sample.GenerateCall, "request", remember), (network.Call, "receive", receive_late),
    ],
    "batches that were taken are forgotten": [
        (history._State, "after", lambda state, kind, fields: kind == "take"
         or AFTER(state, kind, fields)),
    ],
}  # fmt: skip


def test_two_hundred_schedules_pass():
    assert list(simulation.search(range(200))) == []


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_found_and_its_schedule_is_short(mutant):
    with ExitStack() as stack:
        for place, name, value in MUTANTS[mutant]:
            stack.enter_context(mock.patch.object(place, name, value))
        plan, what = next(simulation.search(range(2000)))
        assert what == simulation.simulate(plan), "a schedule decides all"
    assert len(plan.faults) <= 2, plan
    assert simulation.simulate(plan) == "", "rlx itself passes"


def few(seed, servers, total, *faults, batch=1, eta=0, answers=1):
    return Schedule(seed, Limits(batch, eta, 2, total), faults, servers, answers, 0.0, 1.0)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("faults", [
    [(0.7, "server dies unnoticed", 0.02)],
    [(0.7, "journal is cut", 0.5), (1.7, "checkpoint is lost", 0.5)],
], ids=["restart between two probes", "two damages"])  # fmt: skip
def test_what_once_ended_a_run(seed, faults):
    made = [Fault(at, kind, 0, seconds) for at, kind, seconds in faults]
    assert simulation.simulate(few(seed, 1, 3, *made)) == ""


def test_a_server_that_restarts_while_its_answer_to_a_publish_travels():
    """Its new process lacks what the old one confirmed, and looked like another run's."""
    late = Fault(0.46003974382529766, "server dies unnoticed", 0, 0.2330341401913939)
    plan = Schedule(103719, Limits(1, 2, 4, 1), (late,), 2, 1, 0, 10.0)
    assert simulation.simulate(plan) == ""
