"""Orders: requests of one model by their numbers, and weights of several on one fleet."""

from hypothesis import given
from hypothesis import strategies as st

from rlx.tinker.samplers import WeightTurns
from rlx.tinker.tenants import InOrder


@given(st.permutations(range(12)), st.lists(st.integers(0, 11)))
def test_requests_run_once_each_in_the_order_of_their_numbers(numbers, again):
    order, ran = InOrder(), []
    for number in [*numbers, *again]:
        ran += order.add(number, number)
    assert ran == list(range(12))
    assert not order.waiting


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=60))
def test_only_requests_for_the_served_weights_run(steps):
    turns, running, waiting = WeightTurns(), [], []

    def begin(requests):
        for weights, number in requests:
            assert weights == turns.served
            waiting.remove((weights, number))
            running.append(weights)
        assert len({*running}) <= 1

    for number, (weights, ends) in enumerate(steps):
        waiting.append((weights, number))
        begin(turns.add(weights, (weights, number)))
        if ends and running:
            running.pop()
            begin(turns.end())
    while running:
        running.pop()
        begin(turns.end())
    assert not waiting


def test_those_who_wait_for_other_weights_are_not_overtaken():
    turns = WeightTurns()
    assert turns.add("a", 1) == [1]
    assert turns.add("a", 2) == [2]
    assert turns.add("b", 3) == []
    assert turns.add("a", 4) == []  # else b would wait for ever
    assert turns.add("b", 5) == []
    assert turns.end() == []
    assert turns.end() == [3, 5]
