"""errors.py: what the words of a message are made of."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from accel_train.errors import one_line, reason_of


def test_a_long_reason_ends_between_two_words() -> None:
    assert one_line("could not connect to the server", 17) == "could not connect …"
    assert one_line("could not connect", 17) == "could not connect"
    assert one_line("a/path/without/a/space", 6) == "a/path …"
    assert one_line("two\nlines") == "two\\nlines"


@given(st.text(), st.integers(1, 30))
def test_what_is_left_is_one_line_of_the_text(text: str, most: int) -> None:
    whole, short = one_line(text), one_line(text, most)
    assert not set("\r\n") & set(whole)
    assert short == whole if len(whole) <= most else whole.startswith(short[: -len(" …")])
    assert len(short) <= most + len(" …")


def test_the_reason_is_the_first_line_that_says_something() -> None:
    assert reason_of(ValueError("\n  no such file.\nsee the log")) == "no such file"
    assert reason_of(TimeoutError()) == reason_of(TimeoutError(" \n")) == "TimeoutError"
    assert reason_of(OSError("could not connect to the server"), 17) == "could not connect …"
