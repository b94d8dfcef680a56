"""Models that nobody thought of under --bitwise: the same bits on 1, 2 and 4 processes, or a line that refuses them."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path
from typing import Any

import helpers
import pytest
from nets import BLOCKS
from siege import TIMEOUT, FallenError, besiege, check

from accel_train.api import load_run
from accel_train.tools.load_run import LoadedRun

pytestmark = [pytest.mark.slow, TIMEOUT]
NETS = Path(__file__).with_name("nets.py")
WORDS = """
digits --epochs 2 --data.train-limit 96 --batch-size 48 --log-every-updates 1 --schedule.name constant
--allow-change epochs
""".split()  # noqa: SIM905
SETTINGS = [
    "--bitwise true --virtual-batch-size 12 --ema.enabled true",
    "--bitwise true --virtual-batch-size 6 --optim.name adamw --optim.lr 0.01",
    "--bitwise true --virtual-batch-size 12 --optim.clip 0.5 --augment.mixup 0.3",
    "--bitwise true --virtual-batch-size 12 --optim.name lamb --optim.lr 0.01",
    "--virtual-batch-size 12",
]
TIMES = ("time", "seconds", "images_per_second", "data_wait_fraction", "generation")
CLOSE = 1e-3  # of losses without --bitwise, after four updates


def test_models_nobody_thought_of_are_the_same_on_any_number_of_processes_or_refused(tmp_path: Path) -> None:
    besiege(__file__, tmp_path, play)


def play(seed: int, place: Path) -> str:
    """Train a model on 1 process, on 2, and on 4 and then another number. Seeds in a row take all models in turn."""
    names = list(BLOCKS)
    turn, position = divmod(seed, len(names))
    random.Random(f"order {turn}").shuffle(names)
    name, chance = names[position], random.Random(seed)
    setting, last = chance.choice(SETTINGS), chance.choice([1, 2, 4])
    words = [*WORDS, *setting.split(), "--model.name", f"{NETS}:net", "--model.kwargs", json.dumps({"block": name})]
    bitwise = "--bitwise" in setting
    try:
        ends = [train(place / str(processes), words, processes) for processes in (1, 2)]
        ends.append(train(place / "4", [*words, "--epochs", "1"], 4))
        codes = [end.returncode for end in ends]
        if codes == [2, 2, 2]:
            return f"{name}, {setting}: refused, {ends[0].stderr.strip()}"
        check(codes == [0, 0, 0], f"exit codes {codes} on 1, 2, 4 processes\n{''.join(end.stderr for end in ends)}")
        train(helpers.unfinish(place / "4"), words, last)
        for other in ("2", "4"):
            differ = differences(place / "1", place / other, exact=bitwise)
            warned = not bitwise and "warning" in ends[0].stderr
            check(not differ or warned, f"on 1 and on {other} (4: then on {last}) these differ: {', '.join(differ)}")
    except FallenError as error:
        raise FallenError(f"{name!r} with {setting}: {error}") from None
    return f"{name}, {setting}: the same{', or warned of' if not bitwise else ''}"


def train(run: Path, words: list[str], processes: int) -> subprocess.CompletedProcess[str]:
    """Train to the end, or see the model refused in one line."""
    try:
        done = helpers.run(*words, "--output-dir", run, processes=processes, timeout=120)
    except subprocess.TimeoutExpired:
        raise FallenError(f"on {processes} processes it does not end") from None
    text = "\n".join([f"exit code {done.returncode} on {processes} processes", *done.stderr.splitlines()[-3:]])
    check(done.returncode in (0, 2) and "Traceback" not in done.stderr, text)
    errors = [line for line in done.stderr.splitlines() if "error: " in line]
    if done.returncode == 2:
        check(len(errors) == 1 and "model" in errors[0] and "unknown option" not in errors[0], text)
    return done


def differences(one: Path, other: Path, *, exact: bool) -> list[str]:
    """Return what two runs differ in: their weights, the lines of their logs, their figures."""
    runs = load_run(one, trust_code=True), load_run(other, trust_code=True)
    pairs = [(f"{kind} {key}", *found) for kind in ("train", "eval") for key, *found in _lines(*runs, kind)]
    results = [run.result or {} for run in runs]
    named = [name for name in results[0] if name.startswith(("test_", "ema_test_", "updates"))]
    pairs += [(name, results[0][name], results[1].get(name)) for name in named]
    if not exact:
        pairs = [(name, *values) for name, *values in pairs if "loss" in name and None not in values]
        return [
            f"{name} {first} and {second}" for name, first, second in pairs if first != pytest.approx(second, rel=CLOSE)
        ]
    files = [path.name for path in one.glob("*.safetensors")]
    differ = [file for file in files if (one / file).read_bytes() != (other / file).read_bytes()]
    return differ + [f"{name} {first} and {second}" for name, first, second in pairs if first != second]


def _lines(one: LoadedRun, other: LoadedRun, kind: str) -> list[tuple[str, Any, Any]]:
    """Return the values of the lines of one kind, in pairs."""
    rows = [run.rows(kind) for run in (one, other)]
    if kind == "eval":  # the one that is continued evaluates the test split at its first end, too
        rows = [[row for row in lines if row["split"] != "test" or row["epoch"] == 2] for lines in rows]
    check(len(rows[0]) == len(rows[1]) > 0, f"{len(rows[0])} and {len(rows[1])} lines of {kind}")
    return [
        (f"{key} of update {first['update']}", value, second.get(key))
        for first, second in zip(*rows, strict=True)
        for key, value in first.items()
        if key not in TIMES
    ]
