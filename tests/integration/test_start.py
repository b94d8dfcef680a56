"""What a start imports, and how the program ends: fresh processes, as users start them."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.optim import create_optimizer_v2
from torch import nn

from accel_train import cli, user_code
from accel_train.config.schema import Augment, Config, Model, Optim
from accel_train.errors import UserError
from accel_train.optim.optimizer import TORCHS, create_optimizer
from accel_train.training_setup import import_libraries

HEAVY = {"torchvision", "timm", "PIL", "sklearn", "scipy", "pandas", "matplotlib", "pyarrow", "datasets", "tensorboard"}
"""Packages that a training of an own net from arrays must not import."""
PROGRAM = """
import atexit, sys
from accel_train.cli import program

class Last:
    def __del__(self):
        print("taken apart", file=sys.stderr)

last = Last()
atexit.register(lambda: print("MODULES", *sys.modules, file=sys.stderr))
{more}
program(sys.argv[1:])
"""


def ended(words: list[str], more: str = "") -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-c", PROGRAM.format(more=more), *words]
    return subprocess.run(line, capture_output=True, text=True, timeout=240)


@pytest.mark.ci
def test_a_training_imports_nothing_heavy_and_ends_at_once(tmp_path: Path) -> None:
    """With torch's optimizer and schedules, from arrays. What others have registered for the exit is called, what was
    printed is written to a pipe, and the run is complete."""
    done = ended(["train", "digits", "--epochs", "1", "--output-dir", str(tmp_path / "run")])
    assert done.returncode == 0, done.stderr
    modules = next(line for line in done.stderr.splitlines() if line.startswith("MODULES")).split()
    assert not HEAVY & {name.partition(".")[0] for name in modules}
    assert "taken apart" not in done.stderr
    assert done.stdout.rstrip().endswith("recipes") and (tmp_path / "run" / "result.json").exists()


@pytest.mark.slow
def test_a_mistake_keeps_its_code_and_other_ways_are_taken_apart(tmp_path: Path) -> None:
    mistake = ended(["train", "digits", "--epohcs", "1"])
    assert mistake.returncode == 2 and "taken apart" not in mistake.stderr
    assert "taken apart" in ended(["recipes"]).stderr
    profiled = 'exec("import sys; sys.setprofile(lambda *_: None)", {})'  # which keeps no object of the program alive
    assert "taken apart" in ended(["train", "digits", "--epohcs", "1"], profiled).stderr


def test_the_ordinary_end_is_for_trackers_own_code_threads_and_profilers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_code, "USED", [])
    for name in cli.TRACKERS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "gettrace", lambda: None)
    assert cli.may_end_at_once()
    with monkeypatch.context() as patch:
        patch.setattr(user_code, "USED", ["metrics"])
        assert not cli.may_end_at_once()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "wandb", sys)
        assert not cli.may_end_at_once()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "getprofile", lambda: print)
        assert not cli.may_end_at_once()
    waits = threading.Event()
    thread = threading.Thread(target=waits.wait)
    thread.start()
    assert not cli.may_end_at_once()
    waits.set()
    thread.join()


@pytest.mark.parametrize(
    ("config", "library"),
    [
        (Config(optim=Optim(name="lamb")), "timm"),
        (Config(model=Model(name="resnet18")), "timm"),
        (Config(model=Model(name="torchvision/resnet18")), "torchvision"),
        (Config(augment=Augment(policy="randaugment")), "torchvision"),
    ],
)
def test_a_missing_library_is_an_error_at_the_start(
    config: Config, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_libraries(config)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UserError, match=f"needs {library}, which cannot be imported"):
        import_libraries(config)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 3, 4))
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, bias=False))
        self.fc = nn.Linear(4, 2)
        self.fc.weight.requires_grad = False

    def no_weight_decay(self) -> set[str]:
        return {"tok*", "body.2.weight"}


@pytest.mark.parametrize("name", TORCHS)
@pytest.mark.parametrize("decay_all", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("model", [Net(), nn.Linear(2, 3)])
def test_torchs_optimizers_are_those_that_timm_makes(
    name: str, decay_all: bool, weight_decay: float, model: nn.Module
) -> None:
    """Class, groups and their order, and all settings."""
    more: Any = {} if name in ("sgd", "momentum") else {"betas": (0.8, 0.95), "eps": 1e-6}
    optim = Optim(name=name, lr=0.3, momentum=0.7, weight_decay=weight_decay, decay_all=decay_all, **more)
    found = create_optimizer(optim, model)
    expected = create_optimizer_v2(
        model, opt=name, lr=0.3, momentum=0.7, weight_decay=weight_decay, filter_bias_and_bn=not decay_all, **more
    )
    assert type(found) is type(expected)
    assert found.defaults == expected.defaults | {"fused": True}
    assert len(found.param_groups) == len(expected.param_groups)
    for ours, theirs in zip(found.param_groups, expected.param_groups, strict=True):
        assert [*map(id, ours["params"])] == [*map(id, theirs["params"])]
        decay = {"weight_decay": weight_decay} if decay_all else {}
        assert {k: v for k, v in (theirs | {"fused": True} | decay).items() if k != "params"} == {
            k: v for k, v in ours.items() if k != "params"
        }
