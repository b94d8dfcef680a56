"""The display of a run in a notebook, with a stand-in for IPython's."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
from rich.text import Text

from accel_train.records.terminal import NotebookDisplay
from accel_train.run.run import open_console


class Output:
    """What `display` returns, with all that was shown."""

    def __init__(self) -> None:
        self.shown: list[dict[str, str]] = []

    def __call__(self, data: dict[str, str], *, raw: bool, display_id: bool) -> Output:
        assert raw and display_id
        self.shown.append(data)
        return self

    def update(self, data: dict[str, str], *, raw: bool) -> None:
        self.shown.append(data)


@pytest.fixture
def output(monkeypatch: pytest.MonkeyPatch) -> Output:
    made = Output()
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=made))
    return made


def test_it_is_drawn_again_when_it_has_changed(output: Output) -> None:
    texts = ["<one>"]
    display = NotebookDisplay(lambda width: Text(f"{texts[-1]} {width}"), 40, 50)
    display.start()
    time.sleep(0.1)
    texts.append("two")
    deadline = time.monotonic() + 20
    while len(output.shown) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    texts.append("three")
    display.stop()
    assert [each["text/plain"].strip() for each in output.shown] == ["<one> 40", "two 40", "three 40"]
    assert "&lt;one&gt; 40" in output.shown[0]["text/html"]


def test_a_notebook_that_is_closed_does_not_end_the_run(output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("closed")

    texts = iter("abcdefghij")
    display = NotebookDisplay(lambda _: Text(next(texts)), 40, 50)
    display.start()
    monkeypatch.setattr(output, "update", fail)
    display.stop()


@pytest.mark.parametrize(("rank", "live"), [(None, True), ("0", False)])
def test_the_console_has_a_bar_in_a_notebook_but_not_in_what_it_forks(
    rank: str | None, live: bool, output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.delenv("RANK", raising=False)
    if rank:
        monkeypatch.setenv("RANK", rank)
    with open_console(prints=True, total_updates=10, updates_per_epoch=5, epochs=2) as console:
        console.advance(7)
    assert bool(output.shown) == live
    if live:
        assert "epoch 2/2" in output.shown[-1]["text/plain"] and "7/10  70%" in output.shown[-1]["text/plain"]
