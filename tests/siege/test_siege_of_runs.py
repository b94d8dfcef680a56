"""Runs that are killed, stopped, suspended and taken over end, to the bit, as if nobody had touched them."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helpers
import pytest
from scene import Scene
from siege import TIMEOUT, FallenError, besiege, check

from accel_train.api import load_run
from accel_train.ownership.owner import FILE

pytestmark = [pytest.mark.ci, TIMEOUT]
EPOCHS = 6
COMMON = (
    "digits --data.train-limit 480 --data.val-fraction 0.1 --batch-size 48 --log-every-updates 1 "
    "--checkpoint.every-updates 3 --schedule.name constant"
)
RECIPES: dict[str, tuple[str, list[int]]] = {  # options, numbers of processes; without --bitwise one of them for all
    "dropout": (
        "--bitwise true --virtual-batch-size 12 --model.name test_resnet --model.dropout 0.2 --ema.enabled true",
        [1, 2, 4],
    ),
    "three processes": ("--bitwise true --virtual-batch-size 16 --optim.clip 1", [1, 2, 3]),  # two share three batches
    "batchnorm": (
        "--bitwise true --virtual-batch-size 12 --model.name test_resnet --model.drop-path 0.1 --optim.name adamw "
        "--optim.lr 0.002 --augment.mixup 0.2",
        [1, 2, 4],
    ),
    "data workers": (
        "--bitwise true --virtual-batch-size 12 --micro-batch-size 12 --data.workers 1 --augment.policy trivialaugment "
        "--augment.flip 0.5 --augment.erase 0.2",
        [1, 2, 4],
    ),
    "not bitwise": ("--virtual-batch-size 12 --model.name test_resnet --ema.enabled true", [1, 2, 4]),
}  # fmt: skip
TIMES = {
    "time", "seconds", "images_per_second", "data_wait_fraction", "train_seconds", "wall_seconds", "warm_up_seconds",
    "world_size", "division", "cost", "generation",
}  # fmt: skip


def kill(scene: Scene) -> None:
    owner = scene.owner()
    owner.signal(signal.SIGKILL)
    owner.end()


def kill_one_process(scene: Scene) -> None:
    owner = scene.owner()
    with contextlib.suppress(ProcessLookupError):
        os.kill(scene.chance.choice(owner.pids()), signal.SIGKILL)
    owner.end()


def stop(scene: Scene, number: int = signal.SIGTERM) -> None:
    owner = scene.owner()
    trains = owner.owns
    owner.popen.send_signal(number)
    code = owner.end()
    check(code == 0 or owner.launcher or not trains, f"{owner.log.stem} ends with {code} after signal {number}")


def send_usr1(scene: Scene) -> None:
    stop(scene, signal.SIGUSR1)


def stop_twice(scene: Scene) -> None:
    owner = scene.owner()
    owner.popen.send_signal(signal.SIGTERM)
    time.sleep(scene.chance.uniform(0, 0.3))
    owner.popen.send_signal(signal.SIGTERM)
    owner.end()


def stop_and_kill(scene: Scene) -> None:
    owner = scene.owner()
    owner.popen.send_signal(signal.SIGTERM)
    time.sleep(scene.chance.uniform(0, 0.5))
    owner.signal(signal.SIGKILL)
    owner.end()


def ask_to_stop(scene: Scene) -> None:
    owner = scene.owner()
    if owner.owns:
        (scene.run / "STOP").touch()
        owner.end()
        (scene.run / "STOP").unlink(missing_ok=True)  # it had ended already


def ask_to_save(scene: Scene) -> None:
    if scene.owner().owns:
        (scene.run / "SAVE").touch()


def suspend(scene: Scene) -> None:
    owner = scene.owner()
    owner.signal(signal.SIGSTOP)
    time.sleep(scene.chance.uniform(0, 1.5))
    owner.signal(signal.SIGCONT)


def suspend_one_process(scene: Scene) -> None:
    pid = scene.chance.choice(scene.owner().pids())
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(scene.chance.uniform(0, 1.5))
        os.kill(pid, signal.SIGCONT)


def start_a_second(scene: Scene) -> None:
    owner = scene.owner()
    owned = owner.owns and not scene.sleepers
    second = scene.start()
    code = second.end()
    check(
        code != 0 or not (owned and owner.lives), f"{second.log.stem} ran beside {owner.log.stem}, which owns the run"
    )


def take_over(scene: Scene) -> None:
    owner = scene.owner()
    owned = owner.owns
    scene.living = scene.start("--take-over", "true")
    if owned:
        owner.end()
    else:  # it may take the run itself a moment later
        owner.signal(signal.SIGKILL)
        owner.end()


def take_over_from_a_sleeper(scene: Scene) -> None:
    owner = scene.owner()
    if not owner.owns:
        return
    owner.signal(signal.SIGSTOP)
    time.sleep(0.05)
    owner.was_finished = not owner.owns or not owner.lives or finished(scene)
    scene.sleepers.append(owner)
    scene.living = scene.start("--take-over", "true")


def wake(scene: Scene) -> None:
    if scene.sleepers and (scene.living is None or scene.living.owns or not scene.living.lives):
        scene.owner()
        scene.wake(scene.chance.choice(scene.sleepers))


def delete_the_owner(scene: Scene) -> None:
    scene.owner()
    (scene.run / FILE).unlink(missing_ok=True)


ATTACKS: list[Callable[[Scene], None]] = [
    kill, kill, kill_one_process, stop, send_usr1, stop_twice, stop_and_kill, ask_to_stop, ask_to_save, suspend,
    suspend_one_process, start_a_second, take_over, take_over_from_a_sleeper, take_over_from_a_sleeper, wake,
    delete_the_owner,
]  # fmt: skip


def test_attacked_runs_end_to_the_bit_as_if_nobody_had_touched_them(tmp_path: Path) -> None:
    undisturbed: dict[tuple[str, int], Path] = {}

    def play(seed: int, place: Path) -> str:
        chance = random.Random(seed)
        name = chance.choice(list(RECIPES))
        options, worlds = RECIPES[name]
        words = f"{COMMON} {options}".split()
        bitwise = "--bitwise" in words
        worlds = worlds if bitwise else [chance.choice(worlds)]
        key = name, 1 if bitwise else worlds[0]
        if key not in undisturbed:
            undisturbed[key] = tmp_path / f"undisturbed-{len(undisturbed)}"
            end = ("--epochs", EPOCHS, "--output-dir", undisturbed[key])
            done = helpers.run(*words, *end, processes=key[1])
            check(done.returncode == 0, f"without any attack: {done.stderr}")
        scene = Scene(place, words, worlds, EPOCHS, chance)
        try:
            for _ in range(chance.randint(2, 6)):
                attack = chance.choice(ATTACKS)
                scene.tell(attack.__name__.upper())
                attack(scene)
            scene.finish()
            compare(scene.run, undisturbed[key])
        except Exception as error:
            story = "\n  ".join(scene.story)
            reason = str(error) if isinstance(error, FallenError) else repr(error)
            raise FallenError(f"{name}: {reason}\n  {story}") from error
        finally:
            scene.kill_all()
        return f"{name}: {'; '.join(scene.story)}"

    besiege(__file__, tmp_path, play)


def finished(scene: Scene) -> bool:
    return (scene.run / "result.json").exists()


def compare(run: Path, whole: Path) -> None:
    """Raise FallenError if a run is not as it would be without the attacks, for those who read it."""
    one, other = load_run(run), load_run(whole)
    rows, right_rows = plain(one.rows("train")), plain(other.rows("train"))
    updates = [row["update"] for row in rows]
    check(updates == [row["update"] for row in right_rows], f"the log has the updates {updates}")
    differ = [f"{row} instead of {right}" for row, right in zip(rows, right_rows, strict=True) if row != right]
    check(not differ, f"{len(differ)} lines of the log differ, first {differ[:1]}")
    evaluations = plain(one.rows("eval"))
    places = [(row["update"], row["split"], row["weights"]) for row in evaluations]
    check(len(set(places)) == len(places), f"an evaluation is told of twice: {places}")
    missing = [row for row in plain(other.rows("eval")) if row not in evaluations]
    check(not missing, f"these evaluations differ or are missing: {missing}; found {evaluations}")
    for file in sorted(path.name for path in whole.glob("*.safetensors")):
        check((run / file).read_bytes() == (whole / file).read_bytes(), f"{file} differs")
    results = plain([one.result or {}, other.result or {}])
    differ = [name for name in results[1] if results[0].get(name) != results[1][name]]
    check(not differ, f"result.json differs: {[(name, results[0].get(name), results[1][name]) for name in differ]}")
    left = [
        str(path.relative_to(run))
        for path in [*run.glob("checkpoints/*broken*"), *run.glob("checkpoints/.*"), *run.glob("owner*")]
    ]
    check(not left, f"it leaves behind {left}")


def plain(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows without what depends on the time and on the starts."""
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]
