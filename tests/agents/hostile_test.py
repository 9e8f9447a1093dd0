"""A gateway process before a real engine outlives clients that mean it harm."""

import asyncio

import pytest

from experiments.bench import hostile_gateway


@pytest.mark.slow
def test_a_thousand_hostile_requests_leave_a_gateway_as_it_was():
    found = asyncio.run(asyncio.wait_for(hostile_gateway.run(1000), 240))
    assert found["wrong"] == []
    assert found["statuses"]["good 200"] > 100
