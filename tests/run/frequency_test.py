"""When a run saves, evaluates and exports; every property over drawn runs, seeded."""

import json
import random
from types import SimpleNamespace

import pytest

from rlx.run.frequency import KINDS, Position, due, from_host, to_host

ROWS, BATCH = 50, 7


def every(epochs=0, steps=0, seconds=0.0):
    """The keys of a section."""
    return SimpleNamespace(every_epochs=epochs, every_steps=steps, every_seconds=seconds)


def positions(draw: random.Random, steps: int) -> list[Position]:
    found = [Position()]
    for step in range(1, steps + 1):
        seconds = found[-1].seconds + draw.uniform(0.1, 9.0)
        found.append(found[-1].after(step * BATCH, ROWS, seconds))
    return found


def acted(section, path: list[Position], last: Position) -> list[Position]:
    made = []
    for now in path:
        if due(section, last, now):
            made.append(last := now)
    return made


@pytest.fixture(params=range(20))
def draw(request):
    return random.Random(request.param)


def test_steps_and_epochs_are_counted_from_the_beginning(draw):
    path, steps = positions(draw, 60), draw.randint(1, 9)
    found = acted(every(steps=steps), path[1:], path[0])
    assert [p.step for p in found] == list(range(steps, 61, steps))
    epochs = draw.randint(1, 3)
    found = acted(every(epochs=epochs), path[1:], path[0])
    assert [p.epoch for p in found] == list(range(epochs, 60 * BATCH // ROWS + 1, epochs))
    for each in found:  # on the first step at which the pass is complete
        assert each.epoch_step == 0
        assert (each.step - 1) * BATCH < each.epoch * ROWS <= each.step * BATCH


def test_seconds_are_counted_from_the_last_time(draw):
    path, seconds = positions(draw, 60), draw.uniform(1.0, 40.0)
    section, last = every(seconds=seconds), path[0]
    for now in path[1:]:
        assert due(section, last, now) == (now.seconds - last.seconds >= seconds)
        assert not due(section, last, now, clock=False)
        last = now if due(section, last, now) else last


def test_whichever_comes_first_and_never_what_is_off(draw):
    path = positions(draw, 60)
    epochs, steps = draw.randint(0, 3), draw.randint(0, 9)
    seconds = draw.choice([0.0, draw.uniform(1, 60)])
    one = every(epochs, steps, seconds)
    parts = every(epochs=epochs), every(steps=steps), every(seconds=seconds)
    for _ in range(200):
        last, now = sorted(draw.sample(path, 2), key=lambda p: p.step)
        assert due(one, last, now) == any(due(part, last, now) for part in parts)
        assert not due(every(), last, now)
        assert not due(every(epochs, steps), now, now)


def test_a_continued_run_acts_when_the_whole_one_would_have(draw):
    path = positions(draw, 60)
    section = every(draw.randint(0, 3), draw.randint(0, 9), draw.choice([0.0, draw.uniform(1, 60)]))
    cut = draw.randint(1, 59)
    before = acted(section, path[1 : cut + 1], path[0])
    last = dict.fromkeys(KINDS, (path[:1] + before)[-1])
    host = json.loads(json.dumps(to_host(path[cut], last)))
    now, last = from_host(host, Position())
    assert now == path[cut]
    assert before + acted(section, path[cut + 1 :], last["eval"]) == acted(
        section, path[1:], path[0]
    )


def test_a_run_of_an_older_checkpoint_counts_from_it():
    begun = Position(step=12, seconds=99.0)
    assert from_host({}, begun) == (begun, dict.fromkeys(KINDS, begun))


def test_an_export_is_named_by_epoch_step_and_all_steps():
    path = positions(random.Random(0), 9)
    assert path[8].name == "epoch1epochstep0globalstep8"  # 56 of 50 prompts
    assert path[9].name == "epoch1epochstep1globalstep9"


def test_a_batch_of_stragglers_does_not_bring_back_the_epoch_before():
    path = [Position()]
    for prompts in (4, 9, 7, 11):  # the third batch is of prompts before those of the second
        path.append(path[-1].after(prompts, 8, 0.0))
    assert [(p.epoch, p.epoch_step) for p in path[1:]] == [(0, 1), (1, 0), (1, 1), (1, 2)]
    assert [p.step for p in acted(every(epochs=1, steps=3), path[1:], path[0])] == [2, 3]
