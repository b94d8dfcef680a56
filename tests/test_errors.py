"""errors.py: what the words of a message are made of."""

from __future__ import annotations

import ast
import io
from pathlib import Path

import helpers
import pytest
from hypothesis import given
from hypothesis import strategies as st

import accel_train
from accel_train.errors import one_line, print_line, reason_of


def test_a_long_reason_ends_between_two_words() -> None:
    assert one_line("could not connect to the server", 17) == "could not connect …"
    assert one_line("could not connect", 17) == "could not connect"
    assert one_line("a/path/without/a/space", 6) == "a/path …"
    assert one_line("two\nlines") == "two\\nlines"


@given(st.text(), st.integers(1, 30))
def test_what_is_left_is_one_line_of_the_text(text: str, most: int) -> None:
    whole, short = one_line(text), one_line(text, most)
    assert len(whole.splitlines()) <= 1
    assert short == whole if len(whole) <= most else whole.startswith(short[: -len(" …")])
    assert len(short) <= most + len(" …")


def test_the_reason_is_the_first_line_that_says_something() -> None:
    assert reason_of(ValueError("\n  no such file.\nsee the log")) == "no such file"
    assert reason_of(TimeoutError()) == reason_of(TimeoutError(" \n")) == "TimeoutError"
    assert reason_of(OSError("could not connect to the server"), 17) == "could not connect …"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("cat\x1b[2J\x1b]0;owned\x07", "cat\\x1b[2J\\x1b]0;owned\\x07"),
        ("a\rb\nc\td\x7f\x9b31m", "a\\rb\\nc\\td\\x7f\\x9b31m"),
        ("png.\u202egpj.exe\u2066\u2069", "png.\\u202egpj.exe\\u2066\\u2069"),
        ("one\u2028two\u2029", "one\\u2028two\\u2029"),
        ("caf\udce9.png", "caf\\udce9.png"),  # a file's name in Latin-1
    ],
)
def test_a_command_to_the_terminal_is_shown_and_not_obeyed(name: str, shown: str) -> None:
    assert one_line(name) == shown
    stream = io.StringIO()
    print_line(f"{name} is a class", stream)
    assert stream.getvalue() == f"{shown} is a class\n"


@pytest.mark.parametrize(
    "name",
    [
        "Katze, größer",
        "\u0642\u0637\u200c\u0629",
        "חתול\u200f!",
        "ねこ",
        "हिन्दी",
        "e\u0301a\u0308",
        "👩\u200d👩\u200d👧🏽",
        "❤\ufe0f",
    ],
)
def test_names_of_any_language_stay_as_they_are(name: str) -> None:
    assert one_line(name) == name


OF_ITS_OWN = {
    "cli/common.py": "cells",
    "errors.py": "print_line itself",
    "cli/help.py": "the script of a shell, of our own words alone",
}


def test_all_that_is_printed_goes_through_print_line() -> None:
    package = Path(accel_train.__path__[0])
    found = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            called = node.func if isinstance(node, ast.Call) else None
            if (isinstance(called, ast.Name) and called.id == "print") or (
                isinstance(called, ast.Attribute) and called.attr == "print"
            ):
                found.add(str(path.relative_to(package)))
    assert found == OF_ITS_OWN.keys()


EMBEDDING = """
import logging, sys
{setting}
from torch import nn
from accel_train.api import train

def net(num_classes):
    norm = nn.BatchNorm2d(1, track_running_stats=False)  # about which there is a warning
    return nn.Sequential(norm, nn.Flatten(), nn.Linear(64, num_classes))

train("digits", "--epochs", "1", "--output-dir", sys.argv[1], model=net)
"""
OWN_HANDLER = """
logging.basicConfig(format="mine %(levelname)s %(message)s", level=logging.WARNING)
"""


@pytest.mark.parametrize("setting", ['logging.getLogger("accel_train").setLevel(logging.ERROR)', OWN_HANDLER])
def test_a_program_that_embeds_the_trainer_filters_what_it_says(tmp_path: Path, setting: str) -> None:
    done = helpers.python("-c", EMBEDDING.format(setting=setting), tmp_path / "run")
    assert done.returncode == 0 and (tmp_path / "run" / "result.json").exists(), done.stderr
    if setting == OWN_HANDLER:
        assert "mine INFO epoch" not in done.stderr and "mine WARNING model: in evaluation" in done.stderr
    assert "epoch" not in done.stdout and "accel-train: warning" not in done.stderr
