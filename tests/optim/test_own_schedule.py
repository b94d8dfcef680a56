"""`--schedule.name FILE.py:FUNCTION`, the user's own function of the epoch; what a changed learning rate says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import helpers
import pytest
import torch
from accelerate import Accelerator
from torch import nn

from accel_train.checkpoint.directory import delete_checkpoint, list_updates
from accel_train.cli import main
from accel_train.config.options import parse
from accel_train.config.schema import Schedule
from accel_train.errors import UserError
from accel_train.optim.schedule import LearningRate, own_factors

UPDATES = 8  # of an epoch

# SGDR's warm restarts with timm's k-decay, and three epochs of cooldown at the end: options of other programs.
RESTARTS = """
import math

def factor(epoch, epochs):
    if epoch >= epochs - 3:
        return 0.01
    start, length = 0, 2
    while epoch >= start + length:
        start, length = start + length, 2 * length
    return 0.01 + 0.99 * (1 + math.cos(math.pi * ((epoch - start) / length) ** 1.5)) / 2
"""


def made(file: Path, text: str, epochs: int = 12, **settings: object) -> tuple[LearningRate, torch.optim.Optimizer]:
    file.write_text(text)
    schedule = Schedule(name=f"{file}:factor", **settings)  # type: ignore[arg-type]
    length = {"updates": epochs * UPDATES, "updates_per_epoch": UPDATES}
    factors = own_factors(schedule, Accelerator(), **length)
    groups: list[dict[str, Any]] = [
        {"params": [nn.Parameter(torch.zeros(1))]},
        {"params": [nn.Parameter(torch.zeros(1))], "lr_scale": 0.5},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.4)
    return LearningRate(schedule, optimizer, **length, factors=factors), optimizer


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize("per", ["update", "epoch"])
def test_it_multiplies_the_rate_of_each_group_and_the_warm_up(tmp_path: Path, per: str) -> None:
    rate, optimizer = made(tmp_path / "mine.py", RESTARTS, per=per, warmup_epochs=2, warmup_lr=0.1)
    space: dict[str, object] = {}
    exec(RESTARTS, space)
    for update in (0, 5, 17, 95, 3, 40, 96):  # 96 follows the last update: nobody trains with its rate
        rate.step_update(update)
        at = update // UPDATES * UPDATES if per == "epoch" else update
        factor = space["factor"](min(at, 95) / UPDATES, 12.0)  # type: ignore[operator]
        warm = 0.1 + 0.3 * min(1, at / (2 * UPDATES))
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([warm * factor, warm * factor / 2])


def test_one_cycle_of_the_page_is_torchs() -> None:
    page = (Path(__file__).parents[2] / "docs/own.md").read_text()
    space: dict[str, Any] = {}
    exec(page.split("```python\n# schedules.py\n")[1].partition("```")[0], space)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=1200)
    for update in range(1199):
        assert space["one_cycle"](update / 100, 12.0) == pytest.approx(optimizer.param_groups[0]["lr"], abs=0.01)
        optimizer.step()
        theirs.step()


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("1 - epoch / 4", r"returned -0.03125 for epoch 4.125 of 12; expected a finite number that is not negative"),
        ("float('nan')", "returned nan for epoch 0 of 12"),
        ("'half'", "returned half for epoch 0 of 12"),
        ("None", "returned None for epoch 0"),
        ("1 / (epoch - 3)", r"mine.py:factor: (returned -|ZeroDivisionError)"),
        ("unknown", r"NameError: .* \(mine.py, line 2, in factor: `return unknown`\)"),
    ],
)
def test_what_is_no_factor_is_said_before_the_first_update(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        made(tmp_path / "mine.py", f"def factor(epoch, epochs):\n    return {line}\n")


@pytest.mark.usefixtures("fresh_accelerate")
def test_a_state_of_other_factors_is_refused(tmp_path: Path) -> None:
    rate, _ = made(tmp_path / "mine.py", "def factor(epoch, epochs):\n    return 1.0\n")
    rate.step_update(40)
    saved = json.loads(json.dumps(rate.state_dict()))
    later = "def factor(epoch, epochs):\n    return 1.0 if epoch < 5 else 0.5\n"
    other, _ = made(tmp_path / "mine.py", later)
    other.load_state_dict(saved)  # the updates that are done are equal
    rate.step_update(41)
    with pytest.raises(UserError, match="in the 41 updates that are done, the learning rates were others"):
        other.load_state_dict(rate.state_dict())


def test_a_mistake_in_the_name_is_found_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def factor(epoch, epochs):\n    return 1.0\n")
    for name, said in (("fator", "Did you mean 'factor'"), ("", "Name the function in it, too")):
        with pytest.raises(UserError, match=said):
            parse(["digits", "--schedule.name", f"{tmp_path}/mine.py:{name}".rstrip(":")], checks_code=True)
    with pytest.raises(UserError, match="Did you mean 'cosine'"):
        parse(["digits", "--schedule.name", "cosin"])


# Each process, and each call, would compute another one.
RANDOM = """
import random

def factor(epoch, epochs):
    return 0.5 + random.SystemRandom().random()
"""
WORDS = ("digits", "--data.train-limit", 320, "--batch-size", 32, "--bitwise", "true", "--log-every-updates", 1)


@pytest.mark.ci
def test_all_processes_have_the_main_processs_rates(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(RANDOM)
    run = tmp_path / "run"
    words = (*WORDS, "--schedule.name", f"{tmp_path}/mine.py:factor", "--epochs", 1, "--output-dir", run)
    done = helpers.run(*words, processes=2)
    assert done.returncode == 0, done.stderr
    rates = [line["lr"] for line in helpers.lines_of(run, "train")]
    assert len({*rates}) == len(rates) == 10


@pytest.mark.ci
@pytest.mark.usefixtures("fresh_accelerate")
def test_a_resume_compares_the_updates_that_are_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The code may change what comes; another length of the run needs --allow-change, as with cosine."""
    file, run = tmp_path / "mine.py", tmp_path / "run"

    def train(text: str, *words: object) -> tuple[int, str]:
        """Go on after update 5, if there is one."""
        for name in ("result.json", "model.safetensors"):
            (run / name).unlink(missing_ok=True)
        for update in list_updates(run / "checkpoints") if run.exists() else ():
            if update > 5:
                delete_checkpoint(run / "checkpoints", update)
        file.write_text(f"def factor(epoch, epochs):\n    return {text}\n")
        given = ("--schedule.name", f"{file}:factor", "--checkpoint.every-updates", 5, "--checkpoint.keep", 99, *words)
        code = main(["train", *map(str, (*WORDS, *given)), "--output-dir", str(run)])
        helpers.forget_accelerate()
        written = capsys.readouterr()
        return code, written.out + written.err

    assert train("1.0", "--epochs", 2)[0] == 0
    code, said = train("0.9", "--epochs", 2)
    assert code == 2 and "in the 5 updates that are done, the learning rates were others" in said, said
    code, said = train("1.0 if epoch < 1 else 0.3", "--epochs", 2)
    assert code == 0 and "continuing after update 5" in said, said
    code, said = train("1 / epochs", "--epochs", 3)
    assert code == 2 and "epochs" in said and "--allow-change" in said, said
    code, said = train("1 / epochs", "--epochs", 3, "--allow-change", "epochs")
    assert code == 0 and "continuing after update 5" in said, said
    assert train("0.9", "--epochs", 3, "--allow-change", "epochs", "schedule.name")[0] == 0
