"""The console, on a real terminal (a pseudo-terminal) and in a pipe."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

RUN = """
import os, sys, time
from accel_train.records.console import Console
prints = "silent" not in sys.argv
with Console(prints=prints, total_updates=20, updates_per_epoch=10, epochs=2, first_update=2) as console:
    console.say("a [bold]line[/bold]")
    for update in range(3, 21):
        console.advance(update)
        if update % 5 == 0:
            epoch = (update - 1) // 10 + 1
            console.show_training(update, epoch, dict(loss=0.5, accuracy=0.25, lr=1e-3, images_per_second=1234.4,
                                                      data_wait_fraction=0.031))
            time.sleep(0.3)
    console.warn("careful")
    if "fork" in sys.argv:
        if os.fork() == 0:
            print("child:", sys.stdout is sys.__stdout__, flush=True)
            os._exit(0)
        os.wait()
    if "fail" in sys.argv:
        raise KeyboardInterrupt
    console.show_evaluation("test", 2, dict(loss=0.25, accuracy=0.9902, top5_accuracy=1.0), seconds=1.23)
    console.finish("finished", {"test accuracy": "99.02 %", "run": "runs/" + "x" * 70},
                   {"next": "accel-train predict runs/" + "x" * 70})
"""


def in_a_pipe(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", RUN, *words], capture_output=True, text=True)


def on_a_terminal(*words: str, columns: int = 80, **variables: str) -> str:
    """Return the program's output on its terminal, with escape codes."""
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    plain = {"NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS"}
    environment = {name: value for name, value in os.environ.items() if name not in plain}
    environment |= {"TERM": "xterm-256color", **variables}
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, *words], stdin=side, stdout=side, stderr=side, env=environment
    )
    os.close(side)
    content = b""
    while True:
        try:
            chunk = os.read(main, 65536)
        except OSError:  # Linux: the other side is closed
            break
        if not chunk:
            break
        content += chunk
    os.close(main)
    process.wait()
    return content.decode()


def without_codes(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def test_a_log_has_plain_dense_lines() -> None:
    done = in_a_pipe()
    assert done.returncode == 0
    assert "\x1b" not in done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "a [bold]line[/bold]"
    figures = r"loss 0\.5000  accuracy 25\.00%  images/s 1234  lr 0\.001  data wait 3%"
    for line, (epoch, update) in zip(lines[1:5], [(1, 5), (1, 10), (2, 15), (2, 20)], strict=True):
        assert re.fullmatch(rf"epoch {epoch}/2  update {update}/20  {figures}  eta [-\d]:[-\d]+:[-\d]+", line)
    assert lines[1].endswith("eta -:--:--")  # no pace is known yet
    assert lines[4].endswith("eta 0:00:00")
    assert lines[5] == "epoch 2/2  test  loss 0.2500  accuracy 99.02%  (1.2 s)"
    assert lines[6] == "finished"
    assert lines[-1] == "  next           accel-train predict runs/" + "x" * 70  # one line, to be copied
    assert done.stderr == "accel-train: warning: careful\n"


@pytest.mark.parametrize("log", ["| head -n 1", ">/dev/full"])
def test_a_log_that_cannot_be_written_does_not_end_the_run(tmp_path: Path, log: str) -> None:
    words = f"train digits --epochs 1 --output-dir {tmp_path}/run"
    line = f"set -o pipefail; {sys.executable} -m accel_train {words} {log}"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""}  # else nothing is left unwritten
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "result.json").exists()


def test_a_silent_process_prints_nothing() -> None:
    done = in_a_pipe("silent")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert on_a_terminal("silent") == ""


@pytest.mark.parametrize("columns", [80, 120])
def test_a_terminal_has_one_live_display(columns: int) -> None:
    raw = on_a_terminal(columns=columns)
    text = without_codes(raw)
    assert "\x1b[?25l" in raw  # the cursor is hidden while the display lives
    assert raw.rindex("\x1b[?25h") > raw.rindex("\x1b[?25l")
    assert "a [bold]line[/bold]" in text
    assert re.search(r"epoch 1/2 +━+.* 5/10 +50%", text)
    assert re.search(r"total +━+.* 20/20 +100% eta 0:00:00", text)
    assert "loss 0.5000   accuracy 25.00%   images/s 1234   lr 0.001   data wait 3%" in text
    assert "update 5/20" not in text  # no lines of the log
    assert "warning: careful" in text
    assert "─ finished ─" in text
    assert "accel-train predict runs/" + "x" * 70 in text.replace("\r\n", "\n")
    drawn = [line for line in text.splitlines() if "━" in line or "│" in line]
    assert max(len(line.split("\r")[-1]) for line in drawn) <= columns


def test_it_is_redrawn_by_time_and_not_by_update() -> None:
    # 18 updates come in four bursts, 0.3 s apart: some of them are never shown
    shown = set(re.findall(r"(\d+)/20 ", without_codes(on_a_terminal())))
    assert "20" in shown
    assert len(shown) < 10


def test_no_color_is_respected() -> None:
    colours = re.compile(r"\x1b\[[0-9;]*(3[0-9]|38;5;\d+|9[0-7])m")
    assert colours.search(on_a_terminal())
    assert not colours.search(on_a_terminal(NO_COLOR="1"))


def test_a_dumb_terminal_gets_lines() -> None:
    raw = on_a_terminal(TERM="dumb")
    assert "\x1b" not in raw
    assert "update 5/20" in raw


def test_the_cursor_comes_back_after_an_interrupt() -> None:
    raw = on_a_terminal("fail")
    assert raw.rindex("\x1b[?25h") > raw.rindex("\x1b[?25l")


def test_a_forked_worker_does_not_print_through_the_display() -> None:
    assert "child: True" in on_a_terminal("fork")
