"""`--optim.name FILE.py:FUNCTION`: a user's own optimizer is tried before the run, and trained, saved and resumed."""

from __future__ import annotations

import json
from pathlib import Path

import helpers
import pytest
import torch
from accelerate import Accelerator
from test_fsdp import fsdp
from torch import nn

from accel_train.checkpoint.own_optimizer import with_own_optimizer
from accel_train.config.schema import Optim
from accel_train.errors import UserError
from accel_train.models.classifier import find_classifier
from accel_train.optim.optimizer import create_optimizer

# Signs of a momentum that is kept in an attribute of the class, not in its state, where `kept` says so.
OWN = """
import torch

class Signs(torch.optim.Optimizer):
    def __init__(self, groups, beta=0.9, kept="state"):
        super().__init__(groups, {"lr": 1.0, "weight_decay": 0.0, "beta": beta})
        self.kept, self.hidden = kept, {}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                place = self.state[p] if self.kept == "state" else self.hidden.setdefault(p, {})
                mean = place.setdefault("mean", torch.zeros_like(p))
                mean.lerp_(p.grad, 1 - group["beta"])
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(mean.tanh() * group["lr"])

def signs(groups, **settings):
    return Signs(groups, **settings)

def forgets(groups):
    return Signs(groups, kept="elsewhere")

def keeps_still(groups):
    class Still(torch.optim.Optimizer):
        def step(self, closure=None):
            pass
    return Still(groups, {})

def closure(groups):
    return torch.optim.LBFGS([p for group in groups for p in group["params"]])

def switched(groups):
    class Switched(Signs):
        def train(self): pass
        def eval(self): pass
    return Switched(groups)

def some(groups):
    return torch.optim.SGD(groups[:1], lr=0.1)

def rates_lost(groups):
    return torch.optim.SGD([p for group in groups for p in group["params"]], lr=0.1)

def number(groups):
    return 1

def fails(groups):
    class Fails(Signs):
        def step(self, closure=None):
            raise KeyError("what it needs")
    return Fails(groups)

def picky(groups):
    class Picky(Signs):
        def load_state_dict(self, state):
            raise ValueError("not mine")
    return Picky(groups)
"""


def made(tmp_path: Path, name: str, **settings: object) -> tuple[nn.Module, torch.optim.Optimizer]:
    (tmp_path / "mine.py").write_text(OWN)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2, 2))
    find_classifier(model, 2)
    optim = Optim(name=f"{tmp_path}/mine.py:{name}", **{"lr": 0.1, "weight_decay": 0.1, **settings})  # type: ignore[arg-type]
    accelerator = Accelerator()
    model, prepared = accelerator.prepare(model, create_optimizer(optim, model))
    return model, with_own_optimizer(optim, accelerator, model, prepared).optimizer


@pytest.mark.usefixtures("fresh_accelerate")
def test_it_has_the_groups_and_the_arguments_and_is_new(tmp_path: Path) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    model, optimizer = made(tmp_path, "signs", kwargs='{"beta": 0.5}', head_lr=0.2)
    assert type(optimizer).__name__ == "Signs" and not optimizer.state
    assert {(group["weight_decay"], group.get("lr_scale", 1.0), group["beta"]) for group in optimizer.param_groups} == {
        (0.0, 1.0, 0.5), (0.0, 2.0, 0.5), (0.1, 1.0, 0.5), (0.1, 2.0, 0.5),
    }  # fmt: skip
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {*map(id, model.parameters())}
    assert all(parameter.grad is None for parameter in model.parameters()) and before.numel()


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("forgets", {}, "a run that goes on would not be the same: .* a step makes something else of 0.bias"),
        ("keeps_still", {}, r"two steps with gradients did not change 0.bias, with a learning rate of 0.1"),
        ("closure", {}, r"LBFGS computes the loss several times in a step \(a closure\)"),
        ("switched", {}, "Switched must be switched between training and evaluation"),
        ("some", {}, "SGD has 4 parameters; expected the 6 of the groups"),
        ("rates_lost", {"head_lr": 0.2}, "its groups have lost 'lr_scale', that is --optim.head-lr"),
        ("number", {}, "returned an object of type int; expected a torch.optim.Optimizer"),
        ("fails", {}, "a step failed: 'what it needs'"),
        ("picky", {}, "its state cannot be saved and loaded, so that no run could go on: not mine"),
        ("signs", {"kwargs": '{"gamma": 1}'}, "TypeError: .* unexpected keyword argument 'gamma'"),
        ("signs", {"betas": (0.9, 0.99)}, "optim.betas: your own optimizer says it itself"),
    ],
)
def test_what_cannot_be_used_is_refused(tmp_path: Path, name: str, settings: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        made(tmp_path, name, **settings)


WORDS = ("digits", "--data.train-limit", 320, "--batch-size", 32, "--epochs", 2, "--bitwise", "true")


@pytest.mark.ci
def test_the_same_bits_after_a_restart_and_on_two_processes(tmp_path: Path) -> None:
    """A checkpoint of code that keeps another state is not used for it."""
    (tmp_path / "mine.py").write_text(OWN)
    own = ("--optim.name", f"{tmp_path}/mine.py:signs", "--optim.lr", 0.01, "--optim.kwargs", '{"beta": 0.8}')
    words = (*WORDS, *own, "--checkpoint.every-updates", 5, "--checkpoint.keep", 99)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for run in (whole, parts):
        done = helpers.run(*words, "--output-dir", run)
        assert done.returncode == 0, done.stderr
    helpers.go_back_to(5, parts)
    mean = 'place.setdefault("mean", torch.zeros_like(p))'
    other = 'place["other"] if place else place.setdefault("other", torch.zeros_like(p))'
    (tmp_path / "mine.py").write_text(OWN.replace(mean, other))
    done = helpers.run(*words, "--output-dir", parts)
    assert done.returncode == 2 and "does not fit this run's optimizer: KeyError: 'other'" in done.stderr, done.stderr
    (tmp_path / "mine.py").write_text(OWN)
    done = helpers.run(*words, "--output-dir", parts, processes=2)
    assert done.returncode == 0, done.stderr
    assert (parts / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert json.loads((whole / "code.json").read_text())["optim.name"]


@pytest.mark.ci
def test_under_fsdp2(tmp_path: Path) -> None:
    """What FSDP2 has split is tried, too."""
    (tmp_path / "mine.py").write_text(OWN)
    fsdp(tmp_path / "run", "--optim.name", f"{tmp_path}/mine.py:signs", "--optim.lr", "0.01")
    assert helpers.lines_of(tmp_path / "run", "train")
