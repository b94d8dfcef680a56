"""Damaged and hostile run directories under every command: one line, and no harm.

Allowed are the exit codes 0, 1 and 2 and lines that say why. Not allowed: a traceback, a command that does not end, raw
control characters, code of the run that is executed without --trust-code, and the loss of checkpoints or data.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helpers
import pytest
from mutations import LARGE, MUTATIONS, Victim, rehash
from PIL import Image
from siege import TIMEOUT, FallenError, besiege, check

pytestmark = [pytest.mark.slow, TIMEOUT]
DEADLINE = 90  # seconds for what takes less than two on an idle machine; more is a hang
# What one of the commands may fill with the content of a huge file; then it ends with a traceback.
PROGRAM = """
import resource, sys
resource.setrlimit(resource.RLIMIT_DATA, (6 << 30,) * 2)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 28,) * 2)
sys.argv[0] = "accel-train"
"""
COMMAND = PROGRAM + "from accel_train.cli import main; sys.exit(main())"
API = (
    PROGRAM
    + """
from pathlib import Path
from accel_train import api
from accel_train.errors import UserError, one_line
try:
    run = api.load_run(sys.argv[1])
    run.result, run.classes, [run.rows(kind) for kind in ("train", "eval", "checkpoint", "event")]
    run.predict(sorted(Path(sys.argv[2]).iterdir()))
    api.evaluate(sys.argv[1])
except UserError as error:
    print(f"accel-train: error: {one_line(error)}", file=sys.stderr)
    sys.exit(2)
"""
)
CODE_OF_A_RUN = """
from torch import nn

def net(num_classes: int, in_chans: int, image_size: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(in_chans * image_size ** 2, num_classes))
"""
FEW = "--epochs 2 --data.train-limit 96 --checkpoint.every-updates 2 --checkpoint.keep 99"
RUNS = {  # the good runs
    "digits": f"digits {FEW} --model.name test_resnet --ema.enabled true --data.val-fraction 0.1",
    "own code": f"digits {FEW} --model.name FOLDER/mine.py:net",
    "image files": f"digits {FEW} --data.name folder --data.root FOLDER/data --augment.crop center --augment.resize 8 "
    "--model.image-size 8",
}
COMMANDS: dict[str, Callable[[Victim, Path], list[object]]] = {  # of a damaged run, and a good one to compare it with
    "evaluate": lambda victim, _: ["evaluate", victim.run],
    "evaluate another split": lambda victim, _: [
        "evaluate", victim.run, "--split", "val", "--predictions", victim.folder / "new.npz"
    ],
    "evaluate a checkpoint": lambda victim, _: [
        "evaluate", victim.run, "--checkpoint", next(iter(sorted(victim.run.glob("checkpoints/*"))), "x")
    ],
    "predict": lambda victim, _: ["predict", victim.run, victim.images],
    "predict to a file": lambda victim, _: [
        "predict", victim.run, *sorted(victim.images.iterdir()), "--output", victim.folder / "new.csv"
    ],
    "report": lambda victim, _: ["report", victim.run],
    "report of two": lambda victim, good: ["report", good, victim.run, "--output", victim.folder / "new.html"],
    "export": lambda victim, _: ["export", victim.run, "--format", "timm", "--output", victim.folder / "new"],
    "runs": lambda victim, _: ["runs", victim.folder / "runs"],
    "track": lambda victim, _: ["track", victim.run, "--to", "tensorboard"],
    "train": lambda victim, _: [
        "train", victim.run / "config.yaml", *FEW.split(), "--allow-change", "epochs", "--output-dir", victim.run
    ],
    "train anew": lambda victim, _: [
        "train", victim.run / "config.yaml", *FEW.split(), "--output-dir", victim.folder / "runs/new"
    ],
    "train from its weights": lambda victim, _: [
        "train", "digits", *FEW.split(), "--model.name", "test_resnet", "--model.weights", victim.run,
        "--output-dir", victim.folder / "runs/new",
    ],
    "train from its checkpoint": lambda victim, _: [
        "train", victim.run / "config.yaml", *FEW.split(), "--epochs", "3", "--allow-change", "epochs",
        "--resume", victim.run, "--output-dir", victim.folder / "runs/new",
    ],
    "configuration": lambda victim, _: ["train", victim.run / "config.yaml", "--config-only", "true"],
    "api": lambda victim, _: [victim.run, victim.images],
}  # fmt: skip
WRITTEN = ("report.html", "evaluation", "track", "tensorboard")  # beginnings of names, by readers
# Control characters but for the end of a line, and those that turn the direction of a text.
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The good runs, each trained once."""
    folder = tmp_path_factory.mktemp("good")
    (folder / "mine.py").write_text(CODE_OF_A_RUN)
    pixels = random.Random(0)
    for split, count in (("train", 48), ("test", 6)):
        for number in range(count):
            path = folder / "data" / split / "ab"[number % 2] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.frombytes("L", (8, 8), pixels.randbytes(64)).save(path)
    (folder / "images").mkdir()
    for name in ("0.png", "1.png"):
        shutil.copyfile(folder / "data/test" / "ab"[int(name[0])] / name, folder / "images" / name)
    found = {}
    for name, words in RUNS.items():
        found[name] = folder / "runs" / name.replace(" ", "-")
        line = words.replace("FOLDER", str(folder)).split()
        done = helpers.run(*line, "--output-dir", found[name])
        assert done.returncode == 0, done.stderr
        done = helpers.python("-m", "accel_train", "evaluate", found[name], "--trust-code", "true")
        assert done.returncode == 0, done.stderr
    return found


def test_all_commands_work_on_a_good_run(good: dict[str, Path], tmp_path: Path) -> None:
    """Otherwise the siege would show nothing: a command that only refuses does no harm."""
    refused: dict[Any, Any] = {}
    for name, words in COMMANDS.items():
        victim = Victim(tmp_path / name.replace(" ", "-"), good["digits"], images(good), random.Random(0))
        done = execute(name, words(victim, good["digits"]), victim)
        refused |= {name: done.stderr} if done.returncode else {}
    assert not refused


def test_damaged_and_hostile_directories_do_no_harm(good: dict[str, Path], tmp_path: Path) -> None:
    def play(seed: int, place: Path) -> str:
        chance = random.Random(seed)
        name = chance.choice(list(good))
        victim = Victim(place, good[name], images(good), chance)
        mutations = chance.choices(MUTATIONS, k=chance.choice([1, 1, 2, 3]))
        for mutate in mutations:
            mutate(victim)
        if chance.random() < 0.5:
            rehash(victim.run)
        story = f"{name}, {' + '.join(mutate.__name__ for mutate in mutations)}"
        codes = {}
        for command in chance.sample(list(COMMANDS), 3):
            words = COMMANDS[command](victim, good["digits"])
            try:
                codes[command] = attack(command, words, victim, good)
            except FallenError as error:
                raise FallenError(
                    f"{story}, {command}: {error}\nThe command: {' '.join(map(repr, map(str, words)))}"
                ) from None
        return f"{story}: {codes}"

    besiege(__file__, tmp_path, play)


def attack(command: str, words: list[object], victim: Victim, good: dict[str, Path]) -> int:
    """Run a command on the damaged run, and see what it does."""
    trains = command.startswith("train")
    mine, others = contents(victim.run), contents(victim.outside) | contents(images(good).parent)
    try:
        done = execute(command, words, victim)
    except subprocess.TimeoutExpired:
        raise FallenError(f"it has not ended after {DEADLINE} s") from None
    text = f"exit code {done.returncode}\n{done.stdout[-1000:]}\n{done.stderr[-1500:]}"
    check(not victim.sentinel.exists(), f"it executes code of the run\n{text}")
    check(done.returncode in (0, 1, 2) and "Traceback (most" not in done.stderr, text)
    raw = RAW.findall(done.stdout + done.stderr)
    raw += re.findall(r"^lines.*", done.stdout + done.stderr, re.MULTILINE)  # of "two\nlines"
    check(not raw, f"raw characters {set(raw)} in {done.stdout + done.stderr!r:.3000}")
    warned = re.findall(r".*\.py:\d+: \w*Warning.*", done.stderr)
    check(not warned, f"a library warns: {warned}")
    if done.returncode == 2:
        lines = done.stderr.splitlines()
        check(lines and all(line.startswith("accel-train: ") for line in lines) and len(lines) < 20, text)
    else:
        for page in (victim.run / "report.html", victim.folder / "new.html"):
            if command.startswith("report") and page.is_file() and page.stat().st_size < LARGE:
                check("<script>alert" not in page.read_text(errors="replace"), "the page has a script of the run")
    changed = lost(others, contents(victim.outside) | contents(images(good).parent))
    check(not changed, f"it changes what belongs to others: {changed}\n{text}")
    after = contents(victim.run)
    if trains:  # what is damaged is put aside under another name
        kept = set(after.values())
        gone = [path for path, value in mine.items() if "checkpoints" in path.parts and value not in kept]
    else:
        gone = [path for path in lost(mine, after) if not path.relative_to(victim.run).parts[0].startswith(WRITTEN)]
    check(not gone, f"it has lost {gone}\n{text}")
    return done.returncode


def execute(command: str, words: list[object], victim: Victim) -> subprocess.CompletedProcess[str]:
    program = API if command == "api" else COMMAND
    return helpers.python("-c", program, *words, timeout=DEADLINE, cwd=victim.folder)


def images(good: dict[str, Path]) -> Path:
    return good["digits"].parent.parent / "images"


def contents(folder: Path) -> dict[Path, str]:
    """Return what is at each path of a folder: a hash of its content, and its kind. Links are not followed."""
    found = {}
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(place, name)
            status = path.lstat()
            kind = f"{stat.S_IFMT(status.st_mode)} {status.st_size if stat.S_ISREG(status.st_mode) else ''}"
            if stat.S_ISLNK(status.st_mode):
                kind += str(path.readlink())
            elif stat.S_ISREG(status.st_mode) and status.st_size < LARGE:
                kind += hashlib.sha256(path.read_bytes()).hexdigest()
            found[path] = kind
    return found


def lost(before: dict[Path, str], after: dict[Path, str]) -> list[Path]:
    """Return the paths at which there is something else now, or nothing; new ones are no loss."""
    return [path for path, value in before.items() if after.get(path) != value]
