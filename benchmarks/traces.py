"""Counts how far one has to read: which files of the package a command, an update or a signal goes through.

    python benchmarks/traces.py [--files]

It runs real commands on the CPU under a profiler that notes each call of a function of accel_train/. A change of file
is a call of a function in another file than the call before, in the order of time. Python calls a generator once more
to close it before its end; if that runs no line (it has no `finally`), it does not count. `--files`
prints the files of each trace.
"""

from __future__ import annotations

import ast
import atexit
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from inspect import CO_GENERATOR
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "accel_train"
STOPPED_UPDATE = 5
"""The update at whose end the traced training gets SIGTERM: then what follows belongs to the signal alone."""
PARSE, UPDATE, END = "config/options.py parse", "train.py update", "run/run.py count_update"
DECODE = "data/sources/files/images.py decode_jpeg"
CLOSED = ""  # in place of a call that ran no line
Calls = Sequence[str]  # such as "train.py update", in the order of time


@dataclass
class Record:
    """What a traced command has done."""

    calls: list[str] = field(default_factory=list)
    parsed: int = 0
    """The number of calls when the options were parsed."""
    signalled: int = 0
    """The number of calls when SIGTERM came."""
    decoding: list[str] = field(default_factory=list)
    """The functions of the package that wait for a JPEG's decoder, from the outside; generators end in "*"."""
    modules: list[str] = field(default_factory=list)


def record(output: Path, arguments: Sequence[str], *, stop: bool) -> int:
    """Run `accel-train ARGUMENTS` in this process, write its Record to `output`; return the exit code.

    `stop`: send SIGTERM at the end of an update.
    """
    found, names, prefix = Record(), {}, f"{PACKAGE}{os.sep}"
    running: dict[FrameType, tuple[int, int]] = {}  # a generator: the number of its call, and where it goes on

    def name_of(code: CodeType) -> str:
        if code not in names:
            inside = code.co_filename.startswith(prefix) and not code.co_name.startswith("<")
            names[code] = f"{code.co_filename.removeprefix(prefix)} {code.co_name}" if inside else ""
        return names[code]

    def decoding(frame: FrameType | None) -> list[str]:
        stack: list[str] = []
        while frame is not None:
            if name := name_of(frame.f_code):
                stack.append(name + "*" * bool(frame.f_code.co_flags & CO_GENERATOR))
            frame = frame.f_back
        return stack[::-1]

    def profile(frame: FrameType, event: str, _: Any) -> None:
        name = name_of(frame.f_code)
        if event == "call" and name:
            found.calls.append(name)
            if frame.f_code.co_flags & CO_GENERATOR:
                running[frame] = len(found.calls) - 1, frame.f_lasti
            if stop and name == END and found.calls.count(END) == STOPPED_UPDATE:
                found.signalled = len(found.calls)
                os.kill(os.getpid(), signal.SIGTERM)
            if name == DECODE and not found.decoding:
                found.decoding = decoding(frame)
        elif event == "return" and name == PARSE:
            found.parsed = len(found.calls)
        elif event == "return" and frame in running:
            call, before = running.pop(frame)
            if frame.f_lasti == before:
                found.calls[call] = CLOSED

    def write() -> None:  # registered before all others, so it comes after them
        sys.setprofile(None)
        found.modules = [name for name in sys.modules if name.startswith("accel_train.")]
        output.write_text(json.dumps(vars(found)))

    atexit.register(write)
    threading.setprofile(profile)
    sys.setprofile(profile)
    from accel_train.cli import main

    return main(arguments)


def traced(folder: Path, arguments: Sequence[str], *, stop: bool = False) -> Record:
    """Run a command in a process of its own, in `folder`; return what it has done."""
    output = folder / "record.json"
    command = [sys.executable, __file__, "--stop" if stop else "--record", str(output), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stderr}")
    return Record(**json.loads(output.read_text()))


def file_of(call: str) -> str:
    return call.split()[0]


def without_closed(calls: Calls) -> Calls:
    return [call for call in calls if call != CLOSED]


def files(calls: Calls) -> list[str]:
    return sorted({file_of(call) for call in calls})


def changes(calls: Calls) -> int:
    return sum(file_of(one) != file_of(other) for one, other in itertools.pairwise(calls))


def steady_update(calls: Calls) -> Calls:
    """Return the calls from the beginning of an update to that of the next one, as most updates make them."""
    starts = [number for number, call in enumerate(calls) if call == UPDATE]
    updates = [tuple(calls[one:other]) for one, other in itertools.pairwise(starts)]
    return Counter(updates).most_common(1)[0][0]


def files_with_config() -> list[str]:
    """Return the files with a function that takes the whole configuration as `config`."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
        if any(arg.arg == "config" for node in functions for arg in (*node.args.args, *node.args.kwonlyargs)):
            found.append(str(path.relative_to(PACKAGE)))
    return found


def pictures(folder: Path) -> Path:
    """Make a data set of JPEGs with two classes, and return its folder."""
    import numpy
    from PIL import Image

    for split, images in (("train", 32), ("test", 8)):
        for number in range(images):
            path = folder / "pictures" / split / "ab"[number % 2] / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = numpy.random.default_rng(number).integers(0, 256, (40, 40, 3), dtype=numpy.uint8)
            Image.fromarray(pixels).save(path)
    return folder / "pictures"


def count(calls: Calls) -> str:
    return f"{len(set(calls))} functions in {len(files(calls))} files, {changes(calls)} changes of file"


def measure(folder: Path) -> list[tuple[str, str, str, list[str]]]:
    """Return the rows of the table: what is traced, what was counted, the limit, the files."""
    digits = ["train", "digits", "--epochs", "1", "--output-dir"]
    whole = traced(folder, [*digits, "whole"])
    calls = without_closed(whole.calls)
    update = steady_update(calls)
    stopped = traced(folder, [*digits, "stopped"], stop=True)
    exit_calls = without_closed(stopped.calls[stopped.signalled :])
    option = traced(folder, ["train", "digits", "--batch-size", "32", "--config-only", "true"])
    parsing = option.calls[option.calls.index(PARSE) : option.parsed]
    images = ["train", "digits", "--data.name", "folder", "--data.root", str(pictures(folder)), "--epochs", "1"]
    images += ["--batch-size", "8", "--data.workers", "0", "--output-dir", "images"]
    jpeg = traced(folder, images).decoding
    generators = sum(name.endswith("*") for name in jpeg)
    config = files_with_config()
    return [
        ("`train digits`, one epoch", count(calls), "", files(calls)),
        ("modules it imports", str(len(whole.modules)), "120", sorted(whole.modules)),
        ("an update when no line is due", count(update), "24 files, 30 changes", files(update)),
        ("`digits --batch-size 32`", f"{len(parsing)} calls, {count(parsing)}", "5 files", files(parsing)),
        ("SIGTERM to exit", count(exit_calls), "25 files", files(exit_calls)),
        ("a JPEG to its decoder", f"{len(jpeg)} frames, {generators} of them generators", "", jpeg),
        ("files with a parameter `config`", str(len(config)), "", config),
    ]


def main() -> int:
    """Print the table."""
    if sys.argv[1:2] in (["--record"], ["--stop"]):
        return record(Path(sys.argv[2]), sys.argv[3:], stop=sys.argv[1] == "--stop")
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder))
    lines = ["| trace | measured | at most |", "|---|---|---|"]
    lines += [f"| {' | '.join(row[:3])} |" for row in rows]
    print("\n".join(lines))
    if "--files" in sys.argv:
        for name, _, _, places in rows:
            print(f"\n{name}\n  " + "\n  ".join(places))
    return 0


if __name__ == "__main__":
    sys.exit(main())
