"""Values that need arithmetic, compared with the code of the trainer that they are from where it is installed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from timm.scheduler import create_scheduler_v2
from torch import nn
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    LRScheduler,
    SequentialLR,
    StepLR,
)
from torch.optim.swa_utils import AveragedModel

from accel_train.config.options import parse_settings
from accel_train.config.schema import Config
from accel_train.convert.command_line import read_command
from accel_train.convert.recipe import convert
from accel_train.convert.torchvision import adjusted_decay
from accel_train.convert.translation import Translation
from accel_train.optim.ema import create_ema, update_ema
from accel_train.optim.optimizer import BIASES
from accel_train.optim.schedule import LearningRate

UPDATES = 4  # of an epoch


def converted(command: str) -> Translation:
    return convert(read_command(command, "torchvision" if command.startswith("tv") else None))


def setting(command: str, key: str) -> object:
    return converted(command).settings[key].value


def config_of(translation: Translation) -> Config:
    settings: dict[str, object] = {}
    for key, each in translation.settings.items():
        of, _, name = key.replace("-", "_").rpartition(".")
        inner = settings.setdefault(of, {}) if of else settings
        assert isinstance(inner, dict)
        inner[name] = each.value
    return parse_settings(settings)


def rates(translation: Translation, *, last: bool = False) -> list[float]:
    """The learning rate of the first update of each epoch, or of its last one, by the converted recipe."""
    config = config_of(translation)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=config.optim.lr)
    schedule = LearningRate(
        config.schedule, optimizer, updates=round(config.epochs * UPDATES), updates_per_epoch=UPDATES
    )
    result = []
    for epoch in range(round(config.epochs)):
        schedule.step_update(epoch * UPDATES + (UPDATES - 1) * last)
        result.append(optimizer.param_groups[0]["lr"])
    return result


@pytest.mark.parametrize(
    "options",
    [
        {"sched": "step", "decay_epochs": 3, "decay_rate": 0.5, "warmup_epochs": 0},
        {"sched": "step", "decay_epochs": 2, "decay_rate": 0.9, "warmup_epochs": 4},
        {"sched": "multistep", "decay_milestones": [3, 7], "decay_rate": 0.1, "warmup_epochs": 2},
        {"sched": "cosine", "min_lr": 0.01, "warmup_epochs": 0},
        {"sched": "cosine", "min_lr": 0.01, "warmup_epochs": 3, "warmup_prefix": True},
        {"sched": "poly", "decay_rate": 2.0, "warmup_epochs": 2, "warmup_prefix": True, "min_lr": 0.02},
        {"sched": "constant", "warmup_epochs": 0},
        {"sched": "cosine", "min_lr": 0.01, "warmup_epochs": 3},
        {"sched": "poly", "decay_rate": 2.0, "warmup_epochs": 3, "cooldown_epochs": 2},
        {"sched": "cosine", "warmup_epochs": 3, "warmup_prefix": True, "cooldown_epochs": 2, "min_lr": 0.01},
        {"sched": "constant", "warmup_epochs": 3},
        {"sched": "step", "decay_epochs": 3, "decay_rate": 0.5, "warmup_epochs": 2, "warmup_prefix": True},
        {"sched": "step", "decay_epochs": 30, "decay_rate": 0.5, "warmup_epochs": 2, "warmup_prefix": True},
        {"sched": "multistep", "decay_milestones": [3, 7], "warmup_epochs": 2, "warmup_prefix": True},
        {"sched": "step", "decay_epochs": 2.4, "decay_rate": 0.97, "warmup_epochs": 3, "cooldown_epochs": 2},
    ],
)
def test_each_epoch_begins_with_the_rate_of_timm(options: dict[str, Any]) -> None:
    words = ["timm/train.py --model resnet18 --color-jitter 0 --epochs 14 --lr 0.8 --warmup-lr 0.1"]
    for name, given in options.items():
        flag = f"--{name.replace('_', '-')}"
        if given is True:
            words.append(flag)
        else:
            words.append(f"{flag} {' '.join(map(str, given)) if isinstance(given, list) else given}")
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.8)
    theirs, epochs = create_scheduler_v2(optimizer, num_epochs=14, warmup_lr=0.1, **options)
    expected = []
    for epoch in range(epochs):
        theirs.step(epoch)
        expected.append(optimizer.param_groups[0]["lr"])
    translation = converted(" ".join(words))
    assert rates(translation) == pytest.approx(expected)
    assert rates(translation, last=True) == pytest.approx(expected)


@pytest.mark.parametrize("words", ["", "cos_lr=True warmup_epochs=1.5", "warmup_epochs=20"])
def test_a_warm_up_is_that_of_ultralytics(words: str) -> None:
    """At each update, as _setup_scheduler, _get_warmup_iterations and _do_train of its engine/trainer.py compute it."""
    translation = converted(f"yolo classify train data=photos model=x.pt optimizer=SGD batch=64 epochs=6 {words}")
    config = config_of(translation)
    given, biases = ([nn.Parameter(torch.zeros(1))] for _ in range(2))
    groups: list[dict[str, Any]] = [{"params": given}, {"params": biases, BIASES: True}]
    optimizer = torch.optim.SGD(groups, lr=config.optim.lr, momentum=0.937)
    schedule = LearningRate(config.schedule, optimizer, updates=6 * UPDATES, updates_per_epoch=UPDATES)
    options = translation.command.values
    lrf, epochs = options["lrf"], 6
    iterations = round(min(options["warmup-epochs"], epochs - 1) * UPDATES)
    for ni in range(epochs * UPDATES):
        epoch = ni // UPDATES
        falls = max(1 - epoch / epochs, 0) * (1 - lrf) + lrf
        if options["cos-lr"]:
            falls = max((1 - math.cos(epoch * math.pi / epochs)) / 2, 0) * (lrf - 1) + 1
        expected, momentum = [0.01 * falls] * 2, 0.937
        if ni <= iterations:
            expected = [float(np.interp(ni, [0, iterations], [first, 0.01 * falls])) for first in (0.0, 0.1)]
            momentum = float(np.interp(ni, [0, iterations], [0.8, 0.937]))
        schedule.step_update(ni)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(expected), ni
        assert [group["momentum"] for group in optimizer.param_groups] == pytest.approx([momentum] * 2)


@pytest.mark.filterwarnings("ignore")  # torch's own, about SequentialLR
@pytest.mark.parametrize("scheduler", ["steplr", "exponentiallr", "cosineannealinglr"])
@pytest.mark.parametrize(("warmup", "method"), [(0, "linear"), (3, "linear"), (1, "constant"), (3, "constant")])
def test_each_epoch_has_the_rate_of_torchvision(scheduler: str, warmup: int, method: str) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.8)
    main: LRScheduler = StepLR(optimizer, 4, 0.5)
    if scheduler == "exponentiallr":
        main = ExponentialLR(optimizer, 0.5)
    elif scheduler == "cosineannealinglr":
        main = CosineAnnealingLR(optimizer, 12 - warmup, 0.01)
    theirs = main
    if warmup:
        kind = LinearLR if method == "linear" else ConstantLR
        theirs = SequentialLR(optimizer, [kind(optimizer, 0.25, total_iters=warmup), main], [warmup])
    expected = []
    for _ in range(12):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    line = f"tv.py --model resnet18 --lr 0.8 --epochs 12 --lr-scheduler {scheduler} --lr-step-size 4 --lr-gamma 0.5"
    line += f" --lr-min 0.01 --lr-warmup-epochs {warmup} --lr-warmup-decay 0.25 --lr-warmup-method {method}"
    translation = converted(line)
    assert not translation.lost
    assert rates(translation) == pytest.approx(expected)
    assert rates(translation, last=True) == pytest.approx(expected)


def test_the_learning_rate_of_the_batch() -> None:
    base = "torchrun --nproc_per_node=4 --nnodes=2 train.py --model resnet18 --color-jitter 0.4 -b 64"
    assert setting(base, "optim.lr") == 0.1 * 8 * 64 / 256  # SGD: linear
    assert setting(base + " --grad-accum-steps 2", "optim.lr") == 0.4
    assert setting(base + " --grad-accum-steps 2", "batch-size") == 1024
    assert setting(base + " --opt lamb --lr-base 0.005 --lr-base-size 2048", "optim.lr") == 0.0025  # the square root
    assert setting(base + " --opt adamw --lr-base 1e-3", "optim.lr") == pytest.approx(1e-3 * math.sqrt(2))
    assert setting(base + " --opt adamw --lr-base 1e-3 --lr-base-scale linear", "optim.lr") == 2e-3
    assert setting(base + " --lr 0.3", "optim.lr") == 0.3
    assert setting(base + " --lr 0", "optim.lr") == 0.2  # timm takes 0 as not given


@pytest.mark.parametrize("scheduler", ["cosineannealinglr", "steplr"])
@pytest.mark.parametrize("warmup", [0, 2])
def test_the_average_is_that_of_torchvision(scheduler: str, warmup: int) -> None:
    """Its train.py: alpha times the batch and the steps, divided by the epochs; a copy of the model in the warm-up."""
    line = "torchrun --nproc_per_node=2 tv.py --model-ema --model-ema-steps 3 --model-ema-decay 0.999 --epochs 5 -b 64"
    line += f" --lr-scheduler {scheduler} --lr-warmup-epochs {warmup} --lr-warmup-method linear"
    config = config_of(convert(read_command(line, "torchvision")))
    model, per_epoch = nn.Linear(3, 2), 7
    decay = 1 - min(1.0, 0.001 * 2 * 64 * 3 / 5)
    theirs = AveragedModel(model, avg_fn=lambda average, new, _: decay * average + (1 - decay) * new, use_buffers=True)
    ours = create_ema(config.ema, model, per_epoch, config.batch_size, config.epochs)
    assert ours is not None
    generator = torch.Generator().manual_seed(0)
    for update in range(5 * per_epoch):
        with torch.no_grad():
            for weights in model.parameters():
                weights.copy_(torch.randn(weights.shape, generator=generator))
        if update % per_epoch % 3 == 0:
            theirs.update_parameters(model)
            if update // per_epoch < warmup:
                theirs.n_averaged.fill_(0)
        update_ema(ours, model, update + 1)
        for mine, their in zip(ours.module.parameters(), theirs.module.parameters(), strict=True):
            torch.testing.assert_close(mine, their)


def test_the_decay_of_the_average_of_torchvision() -> None:
    assert adjusted_decay(0.99998, 1024, 32, 600) == pytest.approx(1 - 2e-5 * 1024 * 32 / 600)
    assert adjusted_decay(0.9, 1024, 32, 1) == 0


def test_the_sampler_of_torchvision_repeats_on_several_processes() -> None:
    line = " tv.py --ra-sampler --mixup-alpha 0.2"
    assert converted_of("torchrun --nproc_per_node=2" + line, "data.repeats") == 3
    assert converted_of("torchrun --nproc_per_node=2" + line + " --ra-reps 4", "data.repeats") == 4
    assert converted_of("python" + line, "data.repeats") is None
    assert converted_of("python" + line, "augment.mix-mode") == "batch"


def test_an_odd_number_of_images_of_a_process_cannot_be_mixed_in_pairs() -> None:
    translation = convert(read_command("tv.py --mixup-alpha 0.2 --cutmix-alpha 1 -b 25", "torchvision"))
    assert list(translation.lost) == ["--mixup-alpha 0.2"]
    assert not config_of(translation).augment.mixes  # a recipe that starts


def converted_of(command: str, key: str) -> object:
    """The setting of a command of torchvision, None if it is not written."""
    translation = convert(read_command(command, "torchvision"))
    assert not translation.lost
    return translation.settings[key].value if key in translation.settings else None


def test_the_warmup_of_ultralytics() -> None:
    """The rate of biases falls from 0.1 there, of a sum of four gradients, and the momentum rises."""
    line = "yolo classify train data=photos model=m.pt batch=16 lr0=0.01 optimizer="
    config = config_of(converted(line + "SGD warmup_momentum=0.7"))
    schedule = config.schedule
    assert (schedule.warmup_bias_lr, schedule.warmup_momentum, schedule.warmup_method) == (0.4, 0.7, "scaled")
    assert (schedule.warmup_epochs, config.optim.lr, schedule.per) == (3, 0.04, "epoch")
    adam = config_of(converted(line + "Adam")).schedule
    assert (adam.warmup_bias_lr, adam.warmup_momentum) == (0.1, None)
    without = converted(line + "SGD warmup_epochs=0")
    assert not [name for name in without.lost if name.startswith("warmup")]
    theirs = [0.04 * (max(1 - epoch / 100, 0) * 0.99 + 0.01) for epoch in range(100)]
    assert rates(without) == pytest.approx(theirs)
    assert rates(without, last=True) == pytest.approx(theirs)


@pytest.mark.parametrize(("name", "batch"), [("SGD", 16), ("SGD", 8), ("AdamW", 16), ("Adam", 16), ("SGD", 64)])
def test_sums_of_gradients_as_means(name: str, batch: int) -> None:
    """Three updates of ultralytics' kind, with the sum of gradients clipped at 10, and of ours with their mean."""
    passes = max(round(64 / batch), 1)
    line = f"yolo classify train data=photos model=yolo11n-cls.pt optimizer={name} lr0=0.01 batch={batch}"
    optim = config_of(converted(line)).optim
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(5, generator=generator) * size for size in (0.1, 3.0, 20.0)]
    decay = 0.0005 * batch * passes / 64

    def trained(scale: float, lr: float, weight_decay: float, clip: float) -> torch.Tensor:
        weights = nn.Parameter(torch.ones(5))
        kind = getattr(torch.optim, name)
        more = {"momentum": 0.937, "nesterov": True} if name == "SGD" else {"betas": (0.937, 0.999), "eps": 1e-12}
        optimizer = kind([weights], lr=lr, weight_decay=weight_decay, **more)
        for gradient in gradients:
            weights.grad = gradient * scale
            nn.utils.clip_grad_norm_([weights], clip)
            optimizer.step()
        return weights.detach()

    assert optim.clip is not None
    theirs = trained(passes, 0.01, decay, 10.0)
    torch.testing.assert_close(trained(1, optim.lr, optim.weight_decay, optim.clip), theirs, rtol=1e-5, atol=1e-6)


def test_processes_of_ultralytics_share_its_batch() -> None:
    translation = converted("yolo classify train data=photos model=m.pt batch=64 device=0,1 optimizer=SGD lr0=0.01")
    assert [translation.settings[key].value for key in ("batch-size", "virtual-batch-size")] == [64, 32]
    assert translation.processes == 2
    assert translation.settings["optim.lr"].value == 0.02  # DDP takes the mean, and the loss is doubled before
