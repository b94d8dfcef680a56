"""Tables: plain and whole in a pipe, drawn on a (pseudo) terminal. The garbage collector is off during imports only."""

from __future__ import annotations

import gc
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from accel_train.cli.common import importing, print_table

HEAD = ("image", "class", "share")
ROWS = [("a.png", "cat [bold]", "98.00%"), ("a.png", "dog", "2.00%"), ("b" * 40, "dog", "100.00%")]


def test_plain_columns_are_aligned_and_whole(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(HEAD, ROWS, numbers=("share",))
    assert capsys.readouterr().out.splitlines() == [
        f"{'image':40}  class         share",
        f"{'a.png':40}  cat [bold]   98.00%",
        f"{'a.png':40}  dog           2.00%",
        f"{'b' * 40}  dog         100.00%",
    ]


def test_on_a_terminal_long_cells_wrap() -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); from test_common import HEAD, ROWS; "
        "from accel_train.cli.common import print_table\n"
        "print_table(HEAD, ROWS, numbers=('share',))"
    )
    terminal, stdout = pty.openpty()
    environment = os.environ | {"COLUMNS": "50", "TERM": "xterm"}
    subprocess.run([sys.executable, "-c", program], stdout=stdout, env=environment, check=True)
    shown = os.read(terminal, 10_000)
    os.close(stdout)
    os.close(terminal)
    lines = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", shown.decode()).splitlines()]
    assert [line.split() for line in lines] == [
        ["image", "class", "share"],
        ["a.png", "cat", "[bold]", "98.00%"],
        ["a.png", "dog", "2.00%"],
        ["b" * 29, "dog", "100.00%"],
        ["b" * 11],
    ]


def test_importing_collects_again_whatever_the_import_does() -> None:
    with importing(), importing():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), importing():
        raise ImportError
    assert gc.isenabled()
