"""The console, on a real terminal (a pseudo-terminal) and in a pipe."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from pathlib import Path

import helpers
import pytest
from fork_server import server

RUN = """
import os, sys, time
from accel_train.errors import print_logged
from accel_train.records.events import Ended, Evaluated, Logged, Said, Warned
from accel_train.run.run import open_console
from accel_train.task import ONE_LABEL
print_logged()  # as the command line does
prints = "silent" not in sys.argv
with open_console(prints=prints, total_updates=20, updates_per_epoch=10, epochs=2, first_update=2,
                  metrics=ONE_LABEL.metrics) as console:
    console.handle(Said(("a [bold]line[/bold]",)))
    for update in range(3, 21):
        epoch = (update - 1) // 10 + 1
        console.pace.update = update  # as the run does
        if update % 5 == 0:
            metrics = dict(loss=0.5, accuracy=0.25, lr=1e-3, images_per_second=1234.4, data_wait_fraction=0.031)
            console.handle(Logged(update, epoch, 1.0, metrics, None))
            time.sleep(0.3)
    console.handle(Warned("careful"))
    if "fork" in sys.argv:
        if os.fork() == 0:
            # In one piece: the display of the parent is drawn meanwhile.
            os.write(1, f"child: {sys.stdout is sys.__stdout__}\\n".encode())
            os._exit(0)
        os.wait()
    if "fail" in sys.argv:
        raise KeyboardInterrupt
    console.handle(Evaluated("test", 20, 2, dict(loss=0.25, accuracy=0.9902, top5_accuracy=1.0), 9, 1.23))
    console.handle(Ended(20, "finished", "finished", {"test accuracy": "99.02 %", "run": "runs/" + "x" * 70},
                         {"next": "accel-train predict runs/" + "x" * 70}))
"""


def in_a_pipe(*words: str) -> subprocess.CompletedProcess[str]:
    return helpers.python("-c", RUN, *words)


def on_a_terminal(*words: str, columns: int = 80, program: str = RUN, **variables: str) -> str:
    """Return the program's output on its terminal, with escape codes."""
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    plain = {"NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS"}
    environment = {name: value for name, value in os.environ.items() if name not in plain}
    environment |= {"TERM": "xterm-256color", **variables}
    with os.fdopen(side, "wb") as terminal:
        process = server().popen(["-c", program, *words], environment, terminal, terminal, None)
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
        assert re.fullmatch(rf"epoch {epoch}/2  update {update:>2}/20  {figures}  eta [-\d]:[-\d]+:[-\d]+", line)
    assert lines[1].endswith("eta -:--:--")  # no pace is known yet
    assert lines[4].endswith("eta 0:00:00")
    assert lines[5] == "epoch 2/2  test   loss 0.2500  accuracy  99.02%  (1.2 s)"
    assert lines[6] == "finished"
    assert lines[-1] == "  next           accel-train predict runs/" + "x" * 70  # one line, to be copied
    assert done.stderr == "accel-train: warning: careful\n"


def test_the_terminal_that_mpirun_makes_for_a_file_is_none() -> None:
    program = "import os; os.environ['OMPI_COMM_WORLD_RANK'] = '0'\n" + RUN  # its parent's output is no terminal here
    assert "\x1b" not in on_a_terminal(program=program)


@pytest.mark.slow
def test_a_log_that_cannot_be_written_does_not_end_the_run(tmp_path: Path) -> None:
    """Also the interpreter's end, which writes what is left."""
    words = f"train digits --epochs 1 --output-dir {tmp_path}/run"
    line = f"{sys.executable} -m accel_train {words} >/dev/full"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""}  # else nothing is left unwritten
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "result.json").exists()


def test_a_log_that_nobody_reads_any_more_does_not_end_the_run(tmp_path: Path) -> None:
    words = f"-m accel_train train digits --epochs 1 --output-dir {tmp_path}/run"
    with subprocess.Popen(["head", "-n", "1"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as head:
        assert head.stdin is not None
        with (tmp_path / "errors").open("wb") as errors:
            run = helpers.forked(words.split(), 1, helpers.environment(), head.stdin, errors)  # type: ignore[arg-type]
    assert run.wait(60) == 0, (tmp_path / "errors").read_text()
    assert (tmp_path / "run" / "result.json").exists()


@pytest.mark.ci
def test_a_process_that_does_not_print_has_no_live_display() -> None:
    assert "\x1b" not in on_a_terminal("silent")


@pytest.mark.parametrize("columns", [80, 120])
def test_a_terminal_has_one_live_display(columns: int) -> None:
    raw = on_a_terminal(columns=columns)
    text = without_codes(raw)
    assert "\x1b[?25l" in raw  # the cursor is hidden while the display lives
    assert raw.rindex("\x1b[?25h") > raw.rindex("\x1b[?25l")
    assert "a [bold]line[/bold]" in text
    assert re.search(r"epoch 1/2 +━+.* 5/10 +50%", text)
    assert re.search(r"total +━+.* 20/20 +100%", text)
    assert re.search(r"eta 0:00:00 +loss 0\.5000 +accuracy 25\.00% +images/s 1234 +lr 0\.001\s+data wait 3%", text)
    assert "update" not in text  # no lines of the log for the updates
    assert "epoch 2/2  test   loss 0.2500  accuracy  99.02%  (1.2 s)" in text
    assert "warning: careful" in text
    command = text.replace("\r\n", "\n").rpartition("\n  next")[2].strip()
    assert shlex.split(command) == ["accel-train", "predict", "runs/" + "x" * 70]
    drawn = [line for line in text.splitlines() if "━" in line]
    assert max(len(line.split("\r")[-1]) for line in drawn) <= columns


@pytest.mark.ci
@pytest.mark.parametrize("words", [(), ("fail",)])
def test_the_display_vanishes_at_the_end(words: tuple[str, ...]) -> None:
    """Its metrics are of the last updates, which are not the epoch's."""
    raw = on_a_terminal(*words)
    assert raw.rindex("\x1b[?25h") > raw.rindex("\x1b[?25l")  # the cursor comes back
    assert re.search(r"\x1b\[1A\x1b\[2K", raw[raw.rindex("20/20") :])  # its lines are erased
    assert "data wait" not in without_codes(raw[raw.rindex("\x1b[2K") :])


def test_it_is_redrawn_by_time_and_not_by_update() -> None:
    # 18 updates come in four bursts, 0.3 s apart: some of them are never shown
    shown = set(re.findall(r"(\d+)/20 ", without_codes(on_a_terminal())))
    assert "20" in shown
    assert len(shown) < 10


NAMES = """
from accel_train.errors import print_logged
from accel_train.records.events import Ended, Evaluated, Logged, Said, Warned
from accel_train.run.run import open_console
from accel_train.task import ONE_LABEL
print_logged()
name = "cat\\x1b[2J\\x1b]0;owned\\x07\\nforged"
with open_console(prints=True, total_updates=2, updates_per_epoch=1, epochs=2, metrics=ONE_LABEL.metrics) as console:
    console.handle(Said(("said " + name, "an [b]ordinary[/b] line: קטה")))
    console.handle(Warned("warned " + name))
    console.handle(Ended(2, "finished", "ended " + name, {"run": name}, {"next": "predict " + name}))
"""


def test_names_are_no_commands_to_the_terminal() -> None:
    shown = on_a_terminal(program=NAMES, columns=200)
    assert "\x1b[2J" not in shown
    assert "\x1b]0;" not in shown
    for before in ("said ", "warning: warned ", "ended ", "predict "):
        assert before + r"cat\x1b[2J\x1b]0;owned\x07\nforged" in shown
    assert "an [b]ordinary[/b] line: קטה" in shown


def test_a_dumb_terminal_gets_lines() -> None:
    raw = on_a_terminal(TERM="dumb")
    assert "\x1b" not in raw
    assert "update  5/20" in raw


def test_a_forked_worker_does_not_print_through_the_display() -> None:
    assert "child: True" in on_a_terminal("fork")


EPOCHS = """
from accel_train.errors import print_logged
from accel_train.records.events import Ended, Evaluated, Logged, Said, Warned
from accel_train.run.run import open_console
from accel_train.task import ONE_LABEL
print_logged()
with open_console(prints=True, total_updates=100, updates_per_epoch=10, epochs=10,
                  metrics=ONE_LABEL.metrics) as console:
    for epoch in range(1, 11):
        for update in range(epoch * 10 - 9, epoch * 10 + 1):
            console.pace.update = update
        figures = dict(loss=2.0 / epoch, accuracy=epoch / 10)
        metrics = dict(figures, lr=1e-3, images_per_second=1234.4, data_wait_fraction=0.031)
        console.handle(Logged(update, epoch, 1.0, metrics, None))
        for split in ("train", "val"):
            console.handle(Evaluated(split, update, epoch, figures, 9, 1.0))
    console.handle(Ended(100, "finished", "finished", {"speed": "1,234 images/s, 12.3 s of training"}, {}))
"""


def test_an_evaluation_is_one_line_and_the_lines_align() -> None:
    text = without_codes(on_a_terminal(columns=120, program=EPOCHS).replace("\r\n", "\n"))
    shown = [line.rpartition("\r")[2] for line in text.splitlines()]
    lines = [line for line in shown if re.match(r"epoch +\d+/10  (train|val)", line)]
    assert [line.split()[1:3] for line in lines] == [
        [f"{epoch}/10", split] for epoch in range(1, 11) for split in ("train", "val")
    ]
    assert len({len(line) for line in lines}) == 1
    assert lines[-1] == "epoch 10/10  val    loss 0.2000  accuracy 100.00%  (1.0 s)"


def test_a_narrow_terminal_breaks_no_word() -> None:
    text = without_codes(on_a_terminal(columns=40, program=EPOCHS)).replace("\r\n", "\n")
    drawn = re.split("[\r\n]+", text.partition("finished")[0])  # what follows is to be copied
    assert max(map(len, drawn)) <= 40
    words = "epoch train val total eta loss accuracy images/s lr data wait"
    assert set(re.findall(r"[a-z/]{2,}", " ".join(drawn))) == {*words.split()}
