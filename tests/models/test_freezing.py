"""Layers that are not trained: by names, and until some epoch."""

from __future__ import annotations

import json
from pathlib import Path

import helpers
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from accel_train.config.schema import Model, Optim
from accel_train.errors import UserError
from accel_train.models import classifier_names, create_model, set_train_mode
from accel_train.models.classifier import drop_frozen_gradients, find_classifier, freeze
from accel_train.optim.optimizer import create_optimizer


@pytest.mark.parametrize(
    "name", ["resnet18", "torchvision/resnet18", "alexnet_bn", "resnet18_cifar", "test_efficientnet"]
)
def test_a_frozen_body_stays_as_it_is(name: str) -> None:
    settings = Model(name=name, freeze_body=True)
    model = create_model(settings, num_classes=3, channels=3, image_size=64)
    heads = tuple(f"{head}." for head in classifier_names(model))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = torch.optim.SGD([item for item in model.parameters() if item.requires_grad], lr=0.5)
    wrapped = nn.DataParallel(model)  # any wrapper: the mode must reach the inner modules
    for _ in range(2):
        wrapped.eval()
        set_train_mode(wrapped, settings)
        assert model.training
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(8, 3, 64, 64)), torch.randint(3, (8,))).backward()
        optimizer.step()
    after = model.state_dict()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed
    assert all(key.startswith(heads) for key in changed), changed


def test_nothing_to_train_is_an_error() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 1).requires_grad_(False), nn.Flatten())
    find_classifier(model, 2)
    with pytest.raises(UserError, match="nothing to train"):
        freeze(model, Model(freeze_body=True))


def net(**settings: object) -> nn.Module:
    torch.manual_seed(0)
    return create_model(Model(name="test_resnet", **settings), num_classes=3, channels=3, image_size=32)  # type: ignore[arg-type]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, settings: Model, epoch: int = 0) -> set[str]:
    """Make an update of `epoch`; return the layers of which a weight or a statistic has changed."""
    before = {key: value.clone() for key, value in model.state_dict().items()}
    set_train_mode(model, settings, epoch)
    nn.functional.cross_entropy(model(torch.randn(8, 3, 32, 32)), torch.randint(3, (8,))).backward()
    if settings.freeze_epochs is not None:
        drop_frozen_gradients(model)
    optimizer.step()
    optimizer.zero_grad()
    after = model.state_dict()
    return {key.partition(".")[0] for key in before if not torch.equal(before[key], after[key])}


LAYERS = ["conv1", "bn1", "layer1", "layer2", "layer3", "layer4", "fc"]


@pytest.mark.parametrize(
    ("frozen", "trained"),
    [
        (("conv1", "bn1"), LAYERS[2:]),
        (("layer2", "fc"), ["conv1", "bn1", "layer1", "layer3", "layer4"]),
    ],
)
def test_layers_are_frozen_by_name(frozen: tuple[str, ...], trained: list[str]) -> None:
    settings = Model(name="test_resnet", freeze=frozen)
    model = net(freeze=frozen)
    optimizer = create_optimizer(Optim(lr=0.5, weight_decay=0.1), model)
    assert step(model, optimizer, settings) == set(trained)
    needs = {name.partition(".")[0] for name, each in model.named_parameters() if each.requires_grad}
    assert needs == set(trained)


def test_part_of_a_layer_can_be_frozen() -> None:
    model = net(freeze=("layer1.0.bn1",))
    settings = Model(name="test_resnet", freeze=("layer1.0.bn1",))
    before = model.get_buffer("layer1.0.bn1.running_mean").clone()
    step(model, create_optimizer(Optim(lr=0.5), model), settings)
    assert torch.equal(before, model.get_buffer("layer1.0.bn1.running_mean"))
    assert not model.get_submodule("layer1.0.bn1").training and model.get_submodule("layer1.0.bn2").training


@pytest.mark.parametrize(
    ("frozen", "message"),
    [
        (("layer5",), "no layer 'layer5'. Did you mean 'layer4'"),
        (("3",), "no layer '3'. .* from the input: conv1, bn1, layer1"),
        (tuple(LAYERS), "nothing to train: leave out"),
    ],
)
def test_what_cannot_be_frozen_is_told(frozen: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        net(freeze=frozen)


@pytest.mark.parametrize("name", ["sgd", "adamw", "lamb"])
def test_after_some_epochs_all_is_trained(name: str) -> None:
    settings = Model(name="test_resnet", freeze_body=True, freeze_epochs=2)
    model = net(freeze_body=True, freeze_epochs=2)
    optimizer = create_optimizer(Optim(name=name, lr=0.1, weight_decay=0.1), model)
    for epoch in (0, 1):
        assert step(model, optimizer, settings, epoch) == {"fc"}
        assert len(optimizer.state) == 2  # of fc alone: weight and bias
    assert step(model, optimizer, settings, 2) == set(LAYERS)


@pytest.mark.ci
def test_a_frozen_epoch_is_that_of_a_frozen_run(tmp_path: Path) -> None:
    """With momentum, decay and clipping: of what is trained later nothing may have an effect before."""
    words = ("digits", "--data.train-limit", 96, "--batch-size", 32, "--model.name", "test_resnet", "--seed", 3)
    words += (
        "--model.image-size",
        32,
        "--optim.clip",
        0.1,
        "--optim.weight-decay",
        0.1,
        "--model.freeze",
        "conv1",
        "bn1",
        "layer1",
    )
    words += ("--schedule.name", "constant", "--epochs", 3, "--stop.updates", 6)  # two epochs
    for folder, more in (("frozen", ()), ("later", ("--model.freeze-epochs", 2))):
        done = helpers.run(*words, *more, "--output-dir", tmp_path / folder)
        assert done.returncode == 0, done.stderr
    frozen, later = (load_file(tmp_path / folder / "model.safetensors") for folder in ("frozen", "later"))
    assert all(torch.equal(frozen[name], later[name]) for name in frozen)


@pytest.mark.ci
def test_an_evaluation_within_an_epoch_freezes_nothing_again(tmp_path: Path) -> None:
    words = ("digits", "--data.train-limit", 96, "--batch-size", 32, "--model.name", "test_resnet", "--epochs", 2)
    words += ("--model.image-size", 32, "--model.freeze-body", "true", "--model.freeze-epochs", 1)
    for folder, more in (("plain", ()), ("evaluated", ("--eval-every-updates", 1))):
        done = helpers.run(*words, *more, "--output-dir", tmp_path / folder)
        assert done.returncode == 0, done.stderr
    files = [tmp_path / folder / "model.safetensors" for folder in ("plain", "evaluated")]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.ci
def test_frozen_layers_are_not_told_to_have_lost_their_state(tmp_path: Path) -> None:
    """They had none yet when the checkpoint was saved: within an epoch, and at the end of one."""
    words = ("digits", "--data.train-limit", 96, "--batch-size", 32, "--epochs", 3, "--output-dir", tmp_path / "run")
    words += ("--model.freeze-body", "true", "--model.freeze-epochs", 1)
    words += ("--schedule.name", "constant", "--ema.enabled", "true")
    for updates in (2, 3, 5):
        done = helpers.run(*words, "--stop.updates", updates, "--allow-change", "stop")
        assert done.returncode == 0 and "no state" not in done.stdout + done.stderr, done.stderr
        helpers.unfinish(tmp_path / "run")
    assert "continuing after update 3" in done.stdout


WORDS = """
digits --data.train-limit 192 --batch-size 32 --epochs 5 --log-every-updates 1 --checkpoint.every-updates 1
--model.name test_resnet --model.image-size 32 --model.freeze-body true --model.freeze-epochs 1
--optim.name adamw --optim.lr 0.002 --optim.head-lr 0.01 --optim.clip 1
""".split()  # noqa: SIM905


@pytest.mark.slow
def test_it_is_the_same_run_on_any_number_of_processes_and_after_a_kill(tmp_path: Path) -> None:
    words = (*WORDS, "--bitwise", "true")
    whole = helpers.run(*words, "--output-dir", tmp_path / "whole", timeout=200)
    assert whole.returncode == 0, whole.stderr
    killed = tmp_path / "killed"

    def update() -> int:
        lines = (killed / "metrics.jsonl").read_text().splitlines() if (killed / "metrics.jsonl").exists() else []
        return max([json.loads(line).get("update", 0) for line in lines if line.endswith("}")] + [0])

    for processes, least in ((2, 3), (1, 14)):  # in the frozen epoch; after it
        with helpers.started(killed, *words, processes=processes) as started:
            started.until(lambda least=least: update() >= least, timeout=200)  # type: ignore[misc]
    done = helpers.run(*words, "--output-dir", killed, processes=2, timeout=200)
    assert done.returncode == 0, done.stderr
    assert (killed / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()


def test_settings_that_contradict_each_other_are_told(tmp_path: Path) -> None:
    words = ("digits", "--model.freeze-epochs", 1)
    done = helpers.run(*words, "--optim.lr", 0, "--optim.head-lr", 1, "--output-dir", tmp_path / "run")
    assert done.returncode == 2 and not (tmp_path / "run").exists()
    for text in ("nothing is frozen", "optim.head-lr"):
        assert text in done.stderr
