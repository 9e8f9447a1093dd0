"""The calculator: exact, and bounded in what it takes on."""

import asyncio
import time

import pytest

from rlx.rollout.tools import Calculator, ToolError


def computed(expression):
    return asyncio.run(Calculator().run(expression))


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("739*48-5160", "30312"), (" -(2+3)*4", "-20"), ("0.1+0.2", "0.3"),
        ("1/3", "0.333333333333"),
        ("6/3", "2"), ("7//2", "3"), ("-7%3", "2"), ("2**10", "1024"), ("2**-1", "0.5"),
        ("10**1000", "1" + 1000 * "0"), ("1e3", "1000"),
    ],
)  # fmt: skip
def test_values(expression, value):
    assert computed(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "", "1/0", "1+", "9**9**9", "9**-9**9", "2**99999999999", "(2**4000)*(2**4000)", "a",
        "True", "__import__('os')", "'a'*3", "2**0.5", "1e999", "[1]", "1if 1else 2", "(" * 900,
        "1+" * 600, "9" * 1001, "0**-1", "1 .real", "-" * 999 + "1", "1_0j",
    ],
)  # fmt: skip
def test_what_is_no_arithmetic_or_too_large_is_refused_at_once(expression):
    began = time.process_time()
    with pytest.raises(ToolError):
        computed(expression)
    assert time.process_time() - began < 5
