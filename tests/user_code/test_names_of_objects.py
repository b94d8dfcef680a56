"""Objects of a program: their names in a configuration."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

from accel_train.errors import UserError
from accel_train.user_code import GIVEN, importable_name, mistakes, name_of, provided, take_objects

PROGRAM = """
from torch import nn

def helper(x):
    return x

class Net(nn.Module):
    pass

local = (lambda: lambda: 3)()
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of a program that runs as `__main__`."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    main = ModuleType("__main__")
    main.__file__ = str(path)
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(compile(PROGRAM, str(path), "exec"), main.__dict__)
    return main.__dict__


def test_what_can_be_imported_is_called_by_its_name(program: dict[str, Any]) -> None:
    assert importable_name(nn.Linear) == "torch.nn.modules.linear:Linear"
    assert importable_name(program["Net"]) == importable_name(program["local"]) == ""
    plain, objects = take_objects({"model": nn.Linear, "loss": program["helper"], "epochs": 3, "data": None})
    assert plain == {
        "model": {"name": "torch.nn.modules.linear:Linear"},
        "loss": {"name": "<object>:helper"},
        "epochs": 3,
    }
    assert objects == {"loss.name": program["helper"]}


def data(count: int = 4, labels: tuple[int, ...] = (0, 1, 0, 1)) -> dict[str, Any]:
    return {"train": TensorDataset(torch.zeros(count, 1, 2, 2), torch.tensor(labels[:count]))}


@pytest.mark.parametrize(
    ("option", "one", "same", "other"),
    [
        ("model.name", lambda: nn.Linear(2, 3), lambda: nn.Linear(2, 3), lambda: nn.Linear(2, 4)),
        ("model.name", lambda: nn.Linear(2, 3), lambda: nn.Linear(2, 3), lambda: nn.Linear(2, 3, bias=False)),
        ("data.name", data, data, lambda: data(3)),
        ("data.name", data, data, lambda: data(labels=(0, 1, 1, 0))),
        ("data.name", data, lambda: {"train": Subset(data()["train"], [0])}, lambda: {"test": data()["train"]}),
    ],
)
def test_a_fingerprint_is_of_what_a_run_needs_to_be_the_same(
    option: str, one: Callable[[], Any], same: Callable[[], Any], other: Callable[[], Any]
) -> None:
    assert name_of(option, one()) != name_of(option, other())
    if option != "data.name" or isinstance(same()["train"], TensorDataset):
        assert name_of(option, one()) == name_of(option, same())


def test_objects_are_known_only_while_they_are_provided(program: dict[str, Any]) -> None:
    name = name_of("model.name", program["Net"])
    (problem,) = mistakes("model.name", name)
    assert problem.startswith("--model.name: the run was made with an object of a Python program (Net). Give it again")
    with pytest.raises(UserError, match="stop"), provided({"model.name": program["Net"]}):
        assert mistakes("model.name", name) == []
        raise UserError("stop")
    assert not GIVEN


def test_an_option_object_in_a_group_has_the_groups_options_beside_it() -> None:
    net, sets = nn.Linear(2, 2), data()
    plain, objects = take_objects({"model": {"name": net, "image_size": 8}, "data": {"root": "here"}})
    assert plain["model"]["image_size"] == 8 and plain["data"] == {"root": "here"}
    assert objects == {"model.name": net}
    assert take_objects({"data": sets})[1] == {"data.name": sets}


def test_a_schedule_and_an_optimizer_may_be_objects_and_their_options_mappings() -> None:
    def factor(epoch: float, epochs: float) -> float:
        return 1 - epoch / epochs

    plain, objects = take_objects(
        {"schedule": {"name": factor, "warmup_epochs": 1}, "optim": {"name": "adamw", "kwargs": {"amsgrad": True}}}
    )
    assert plain == {
        "schedule": {"name": "<object>:factor", "warmup_epochs": 1},
        "optim": {"name": "adamw", "kwargs": {"amsgrad": True}},
    }
    assert objects == {"schedule.name": factor}
    assert take_objects({"optim": torch.optim.Rprop})[0]["optim"]["name"] == "torch.optim.rprop:Rprop"
