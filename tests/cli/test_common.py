"""Tables are aligned and whole. The garbage collector is off during imports only."""

from __future__ import annotations

import gc

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


def test_importing_collects_again_whatever_the_import_does() -> None:
    with importing(), importing():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), importing():
        raise ImportError
    assert gc.isenabled()
