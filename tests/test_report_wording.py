"""How seconds are written."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greedysnake.report.wording import seconds

_MINUTES = re.compile(r"(\d+) min (\d+) s")


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (119.4, "119 s"),
        (119.7, "2 min 0 s"),
        (179.7, "3 min 0 s"),
        (200, "3 min 20 s"),
        (7199.2, "119 min 59 s"),
        (7199.7, "2.0 h"),
    ],
)
def test_seconds_are_rounded_before_they_are_split_into_minutes(value, written):
    assert seconds(value) == written


@given(st.floats(119.5, 7199.49))
def test_minutes_and_seconds_say_the_value_to_the_second(value):
    found = _MINUTES.fullmatch(seconds(value))
    assert found is not None
    minutes, rest = map(int, found.groups())
    assert rest < 60
    assert abs(60 * minutes + rest - value) <= 0.5
