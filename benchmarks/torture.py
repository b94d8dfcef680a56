"""Kill programs that train ten times, on two processes, then one, then four, and count what that has cost.

    python benchmarks/torture.py                      # writes docs/benchmarks.md and docs/torture.svg, half an hour
    python benchmarks/torture.py --data-root ~/data   # MNIST instead of digits
    python benchmarks/torture.py --quick              # two kills; writes nothing

accel_train, Accelerate, timm and Lightning train the same net with the same optimizer on the same images; the programs
of the others are in interrupted/, and resume as their documentation shows. All save every 10 updates; timm, if nothing
else is said, at the end of each epoch. Every program is killed (SIGKILL, all of its processes) after the same numbers
of updates of a start, and once while it writes a checkpoint; then the same command starts it again. If that fails, as
on half a checkpoint, its newest checkpoint is deleted, as a person would do, and it is started once more.

What happened is not asked of the programs: the net that they train writes it down (interrupted/observed.py). The last
weights, and the loss of each update, are compared with those of the same program when nothing interrupts it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import document
import tasks
import torch
import turns
from interrupted import history, observed

from accel_train.cli.common import print_table
from accel_train.tools.report.curves import import_pyplot

HERE = Path(__file__).resolve().parent / "interrupted"
ACCELERATE = [
    "-m",
    "accelerate.commands.launch",
    "--config_file",
    HERE.parents[1] / "accelerate_configs/multi_cpu.yaml",
]
IN_A_SAVE = -1
KILLS = [  # the processes, and after how many updates of the start they are killed
    (2, 17), (2, 41), (2, 8), (2, IN_A_SAVE), (1, 33), (1, 5), (1, 27), (4, 38), (4, 12), (4, 52),
]  # fmt: skip
LAST = 4  # processes of the start that nobody kills
TIMEOUT = 600  # seconds of a start
ATTEMPTS = 4  # at a start that fails


@dataclass(frozen=True)
class Program:
    """A program of the race: its line for some processes, of words for python, and its folder of checkpoints."""

    name: str
    line: Callable[[int, Path], list[object]]
    note: str


def accel_train(*words: object) -> Callable[[int, Path], list[object]]:
    def line(processes: int, folder: Path) -> list[object]:
        launcher = [*ACCELERATE, "--num_processes", processes] if processes > 1 else []
        return [*launcher, "-m", "accel_train.train", HERE / "recipe.yaml", "--output-dir", folder, *words]

    return line


def script(file: str, launcher: Callable[[int], list[object]], *words: object) -> Callable[[int, Path], list[object]]:
    return lambda processes, folder: [*launcher(processes), HERE / file, "--folder", folder, *words]


def accelerate(processes: int) -> list[object]:
    return [*ACCELERATE, "--num_processes", processes] if processes > 1 else []


def torchrun(processes: int) -> list[object]:
    return ["-m", "torch.distributed.run", "--nproc-per-node", processes]


PROGRAMS = [
    Program("accel_train", accel_train(), "as it is"),
    Program("accel_train, bitwise", accel_train("--bitwise", "true"), "with `--bitwise true`"),
    Program("Accelerate", script("with_accelerate.py", accelerate), "`save_state` and `skip_first_batches`"),
    Program(
        "Accelerate, seedable",
        script("with_accelerate.py", accelerate, "--seedable"),
        "the same with `use_seedable_sampler` and `set_epoch`",
    ),
    Program("timm", script("with_timm.py", torchrun), "`--resume last.pth.tar`, saved each epoch"),
    Program(
        "timm, recovery",
        script("with_timm.py", torchrun, "--recovery"),
        "the same, with `--recovery-interval` and its newest file",
    ),
    Program(
        "Lightning",
        lambda processes, folder: [HERE / "with_lightning.py", "--folder", folder, "--processes", processes],
        '`ModelCheckpoint(every_n_train_steps)`, `fit(ckpt_path="last")`',
    ),
]


@dataclass
class Outcome:
    """What a program did under the kills, compared with itself without them."""

    kills: int
    failed: int
    """Starts that ended with an error."""
    updates: int
    """That led to the last weights."""
    lost: int
    """Updates that were done and lost, and so done again."""
    missed: int
    repeated: int
    loss_difference: float
    """The mean over the updates of how much the loss differs from that of the uninterrupted run."""
    weight_distance: float
    """From the last weights to those of the uninterrupted run, as a part of the way from its first to its last."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, help="folder with MNIST in torchvision's layout; default: digits")
    parser.add_argument("--programs", nargs="+", choices=[each.name for each in PROGRAMS], help="default: all")
    parser.add_argument(
        "--output",
        type=Path,
        help="keep the records here, and go on from those that are there; default: a temporary folder",
    )
    parser.add_argument("--quick", action="store_true", help="two kills")
    parser.add_argument("--no-write", action="store_true", help="only print the table")
    options = parser.parse_args()
    if options.data_root:
        os.environ[observed.MNIST] = str(options.data_root.resolve())
    command = "python benchmarks/torture.py" + " --data-root DIR" * bool(options.data_root)
    figures: dict[str, Any] = {"circumstances": document.circumstances(command), "programs": {}}
    kills = [(2, 17), (1, IN_A_SAVE)] if options.quick else KILLS
    with contextlib.ExitStack() as stack:
        folder = options.output or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for program in PROGRAMS:
            if program.name in (options.programs or [program.name]) and (
                program.name != "Lightning" or tasks.has_lightning()
            ):
                outcome = race(program, kills, folder.resolve() / program.name.replace(", ", "_"))
                figures["programs"][program.name] = asdict(outcome)
                print_table(*rows(figures["programs"]))
    if options.quick or options.no_write or options.programs:
        return
    plot(figures["programs"], document.DOCS / "torture.svg")
    document.tell("torture", document.write("torture", markdown(figures), figures))


def race(program: Program, kills: Sequence[tuple[int, int]], folder: Path) -> Outcome:
    """Run a program without and with the kills, and compare. What is finished in the folder is not done again."""
    finished = folder / "outcome.json"
    if finished.exists():
        return Outcome(**json.loads(finished.read_text()))
    whole, _, _ = run(program, [], kills[0][0], folder / "whole")
    starts, killed, failed = run(program, kills, LAST if len(kills) == len(KILLS) else 2, folder / "killed")
    reference, kept = history.kept_steps(whole), history.kept_steps(starts)
    images = len(observed.images_and_labels()[0])
    if history.missed_and_repeated(reference, images, observed.BATCH) != (0, 0):
        raise SystemExit(f"{program.name} does not see each image once an epoch even if nothing interrupts it.")
    initial, expected = weights(folder / "whole", "before.pt"), weights(folder / "whole", "after.pt")
    final = weights(folder / "killed", "after.pt")
    pairs = list(zip(kept, reference, strict=False))  # a program may end early
    missed, repeated = history.missed_and_repeated(kept, images, observed.BATCH)
    outcome = Outcome(
        kills=killed,
        failed=failed,
        updates=len(kept),
        lost=sum(len(start.steps) for start in starts) - len(kept),
        missed=missed,
        repeated=repeated,
        loss_difference=sum(abs(one.loss - other.loss) for one, other in pairs) / len(pairs),
        weight_distance=float((final - expected).norm() / (expected - initial).norm()),
    )
    finished.write_text(json.dumps(asdict(outcome)))
    return outcome


def weights(folder: Path, name: str) -> torch.Tensor:
    """All weights of the first ("before.pt") or last ("after.pt") start that has any, as one vector in float64."""
    found = sorted(folder.glob(f"start-*/{name}"))
    chosen = found[0] if name == "before.pt" else found[-1]
    return torch.cat([each.flatten().double() for each in torch.load(chosen, weights_only=True).values()])


def run(
    program: Program, kills: Sequence[tuple[int, int]], last: int, folder: Path
) -> tuple[list[history.Start], int, int]:
    """Start a program until it ends by itself, and kill it as `kills` says; `last`: the processes of the last start.

    Returns what the net saw in each start, how many of them were killed, and how many failed.
    """
    shutil.rmtree(folder, ignore_errors=True)
    starts: list[Any] = []
    killed = failed = tries = 0
    plan: list[tuple[int, int | None]] = [*kills, (last, None)]
    while plan:
        processes, moment = plan[0]
        records = folder / f"start-{len(starts):02d}"
        records.mkdir(parents=True)
        began = time.monotonic()
        code = start(program.line(processes, folder / "run"), processes, moment, records, folder / "run")
        starts.append(history.read_start(records))
        text = "killed" if code is None else f"ended with {code}"
        steps = len(starts[-1].steps)
        seconds = time.monotonic() - began
        print(f"{program.name}: {steps} updates on {processes}, {text}, {seconds:.0f} s", flush=True)
        if code is None:
            killed += 1
        elif code == 0:
            break
        else:
            failed, tries = failed + 1, tries + 1
            errors = re.findall(r"^\S*Error.*", (records / "log").read_text(), re.MULTILINE)
            print(*(errors[:1] or [records / "log"]))
            if tries == ATTEMPTS or not delete_newest(folder / "run"):
                raise SystemExit(f"{program.name} does not start any more: {records / 'log'}")
            continue
        tries = 0
        plan.pop(0)
    return starts, killed, failed


def start(words: list[object], processes: int, moment: int | None, records: Path, folder: Path) -> int | None:
    """Start a program and kill it at the moment. Returns its exit code, None if it was killed."""
    variables = {
        "OMP_NUM_THREADS": "1",  # there are more processes than cores
        "ACCELERATE_USE_CPU": "true",
        "CUDA_VISIBLE_DEVICES": "",
        observed.LOG: str(records),
    }
    program = turns.Program(words, records / "log", variables)
    deadline = time.monotonic() + TIMEOUT
    known: dict[Path, tuple[int, int]] | None = None
    try:
        while program.process.poll() is None:
            if time.monotonic() > deadline:
                raise SystemExit(f"{' '.join(program.line)} took more than {TIMEOUT} s: {records / 'log'}")
            if moment is not None and done(records) >= (2 if moment == IN_A_SAVE else moment):
                if moment != IN_A_SAVE:
                    return None
                known = files(folder) if known is None else known
                if any(size and known.get(path) != (when, size) for path, (when, size) in files(folder).items()):
                    return None
            else:
                time.sleep(0.002)
        return int(program.process.returncode)
    finally:
        program.end()


def done(records: Path) -> int:
    """How many steps rank 0 has done in this start."""
    with contextlib.suppress(FileNotFoundError):
        return (records / "rank0.jsonl").read_bytes().count(b'"done"')
    return 0


def files(folder: Path) -> dict[Path, tuple[int, int]]:
    """The files of checkpoints that are being written or were: the time and the size of each."""
    found = {}
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            if path.is_file() and status.st_size > 100_000:  # weights, not a log
                found[path] = (status.st_mtime_ns, status.st_size)
    return found


def delete_newest(folder: Path) -> bool:
    """Delete the newest checkpoint, as a person does when it cannot be read. Returns whether there was one."""
    found = sorted(folder.iterdir(), key=lambda path: path.lstat().st_mtime) if folder.is_dir() else []
    if not found:
        return False
    if found[-1].is_dir():
        shutil.rmtree(found[-1])
    else:
        found[-1].unlink()
    return True


def rows(programs: dict[str, dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the table."""
    head = [
        "", "starts that failed", "updates", "done twice", "images missed", "images repeated", "loss differs by",
        "weights differ by",
    ]  # fmt: skip
    table = [
        [
            name, f"{found['failed']}", f"{found['updates']}", f"{found['lost']}", f"{found['missed']:,}",
            f"{found['repeated']:,}", f"{found['loss_difference']:.2g}", f"{found['weight_distance']:.2g}",
        ]
        for name, found in programs.items()
    ]  # fmt: skip
    return head, table


def markdown(figures: dict[str, Any]) -> str:
    head, table = rows(figures["programs"])
    return "\n".join(
        [*document.table(head, table), "", document.caption(figures["circumstances"]), "", "![](torture.svg)"]
    )


def plot(programs: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw what was lost as bars: updates, images, and the distance from the uninterrupted run."""
    names = list(programs)
    panels: list[tuple[str, list[float], str]] = [
        ("updates done twice", [found["lost"] for found in programs.values()], "{:.0f}"),
        (
            "images missed or repeated\nin their epoch",
            [found["missed"] + found["repeated"] for found in programs.values()],
            "{:,.0f}",
        ),
        (
            "distance of the last weights from\nthose of an uninterrupted run",
            [found["weight_distance"] for found in programs.values()],
            "{:.2g}",
        ),
    ]
    figure, axes = import_pyplot().subplots(
        1, 3, figsize=(10, 0.4 * len(names) + 1.2), sharey=True, layout="constrained"
    )
    for axis, (title, values, form) in zip(axes, panels, strict=True):
        colours = ["#6aaee6" if name.startswith("accel_train") else "#b0b8c0" for name in names]
        bars = axis.barh(names, values, color=colours)
        axis.bar_label(bars, [form.format(value) for value in values], padding=3)
        axis.set(title=title, xlim=(0, 1.2 * max(values) or 1))
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
