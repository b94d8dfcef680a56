"""Updates of the recipes of published trainings are those of the source's own code: timm's, torchvision's and torch's.

The trainer draws, augments and mixes images; the source gets the same ones, with the same weights, and computes loss,
gradients, learning rates, step and EMA as its training script does. Random numbers differ by construction, so dropout
and stochastic depth are off; their rates are compared apart. The batch is that of two GPUs, two virtual batches here:
each has its own BatchNorm. Running statistics are not compared: a GPU keeps its own there. All is in float64, because
the gradient of a deep network cannot be told from float32. Large models are replaced by small ones of the same layers;
another test compares the architectures.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import reference
import timm
import torch
import torchvision
from timm.data.mixup import one_hot
from timm.loss import BinaryCrossEntropy, LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2, optimizer_kwargs
from timm.scheduler import create_scheduler_v2, scheduler_kwargs
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.optim.swa_utils import AveragedModel
from torchvision.models.convnext import CNBlockConfig
from torchvision.ops._utils import split_normalization_params

from accel_train import models, training_setup
from accel_train.checkpoint.state import TrainState
from accel_train.config.options import parse
from accel_train.data.sources.load import splits_of
from accel_train.launch.environment import prepare_environment
from accel_train.optim.schedule import LearningRate
from accel_train.records.events import Stream
from accel_train.records.meter import Meter
from accel_train.step import Guard
from accel_train.task import ONE_LABEL
from accel_train.train import update
from accel_train.training_setup import TrainingSetup, connect, create_training_setup

pytestmark = [pytest.mark.usefixtures("fresh_accelerate"), pytest.mark.slow]
PUBLISHED: dict[str, dict[str, Any]] = reference.published()["recipes"]
GPUS, IMAGES, CLASSES = 2, 8, 10  # IMAGES: of a GPU; CLASSES: of synthetic data
SMALL = f"""
--data.name synthetic --data.train-limit 256 --data.workers 0
--data.test-limit 8 --batch-size {GPUS * IMAGES} --virtual-batch-size {IMAGES}
""".split()

NO_DROP = ["--model.drop-path", "0"]
SMALL_MODELS = {
    "imagenet_efficientnet_b0": ["--model.dropout", "0", *NO_DROP],
    "imagenet_resnet50_a2": ["--model.name", "resnet18", *NO_DROP],
    "imagenet_resnet50_v2": ["--model.name", "torchvision/resnet18"],
    "imagenet_convnext_tiny": ["--model.name", f"{__file__}:small_convnext"],
    "imagenet_vit_b16": ["--model.name", f"{__file__}:small_vit"],
    "imagenet_deit_small": ["--model.name", "deit_tiny_patch16_224", *NO_DROP],
}


def small_convnext(num_classes: int) -> nn.Module:
    """torchvision's ConvNeXt with two stages of one block."""
    stages = [CNBlockConfig(16, 32, 1), CNBlockConfig(32, None, 1)]
    return torchvision.models.ConvNeXt(stages, num_classes=num_classes)


def small_vit(num_classes: int) -> nn.Module:
    """torchvision's ViT with two layers."""
    return torchvision.models.VisionTransformer(32, 16, 2, 3, 48, 96, num_classes=num_classes)


@dataclass
class Source:
    """What the training script of a source creates."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    """Of (logits, labels, labels of the partners, shares of the image itself)."""
    begin_epoch: Callable[[int], None]
    """Sets the learning rates of an epoch, from 0; epochs come one after the other."""
    average: Callable[[int, int, int], nn.Module | None]
    """Updates the EMA after an update, (epoch, update in it, updates of an epoch), and returns the average."""
    clip: float | None = None


# The options of timm's and torchvision's train.py that the code below reads, with their defaults.
TIMM: dict[str, Any] = {
    "model": "resnet50", "drop": 0.0, "drop-path": None, "drop-connect": None, "opt": "sgd", "opt-eps": None,
    "opt-betas": None, "lr": None, "momentum": 0.9, "weight-decay": 2e-5, "opt-kwargs": {}, "clip-grad": None,
    "layer-decay": None, "layer-decay-min-scale": 0, "layer-decay-no-opt-scale": None,
    "sched": "cosine", "sched-on-updates": False, "epochs": 300, "decay-epochs": 90, "decay-rate": 0.1,
    "decay-milestones": [90, 180, 270], "warmup-epochs": 5, "warmup-lr": 1e-5, "warmup-prefix": False, "min-lr": 0,
    "cooldown-epochs": 0, "patience-epochs": 10, "eval-metric": "top1", "lr-noise": None, "lr-noise-pct": 0.67,
    "lr-noise-std": 1.0, "seed": 42, "lr-cycle-mul": 1.0, "lr-cycle-decay": 0.5, "lr-cycle-limit": 1, "lr-k-decay": 1.0,
    "mixup": 0.0, "cutmix": 0.0, "smoothing": 0.1, "bce-loss": False, "bce-target-thresh": None,
    "model-ema": False, "model-ema-decay": 0.9998,
}  # fmt: skip
TORCHVISION: dict[str, Any] = {
    "opt": "sgd", "lr": 0.1, "momentum": 0.9, "wd": None, "weight-decay": 1e-4, "norm-weight-decay": None, "epochs": 90,
    "lr-warmup-epochs": 0, "lr-warmup-decay": 0.01, "lr-min": 0.0, "label-smoothing": 0.0, "clip-grad-norm": None,
    "model-ema-steps": 32, "model-ema-decay": 0.99998,
}  # fmt: skip


def number(word: str) -> int | float | str:
    """The number that the word is, or else the word."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(word)
    return word


def options_of(name: str, defaults: dict[str, Any]) -> argparse.Namespace:
    """The options of the recipe's command, by the names that timm's factories read; without those of no default."""
    words, values = shlex.split(f"{PUBLISHED[name]['command']} {PUBLISHED[name].get('defaults', '')}"), dict(defaults)
    for word, following in itertools.pairwise([*words, "--"]):
        if word.startswith("--") and (key := word[2:]) in defaults:
            values[key] = True if following.startswith("--") else number(following)
    return argparse.Namespace(**{key.replace("-", "_"): each for key, each in values.items()})


def options_of_deit(name: str) -> argparse.Namespace:
    """The options of DeiT's main.py."""
    values = {key: row["there"] for keys, row in PUBLISHED[name]["rows"].items() for key in keys.split(", ")}
    values |= {"lr": values["lr"] * 256 * 4 / 512.0, "lr-noise": None, "lr-cycle-mul": 1.0, "decay-rate": 0.1}
    values |= {"decay-epochs": 30, "lr-cycle-limit": 1, "bce-loss": False}
    return argparse.Namespace(**{key.replace("-", "_"): each for key, each in values.items()})


def timm_source(name: str, model: nn.Module) -> Source:
    """As timm's train.py creates it, and DeiT's main.py, which calls the schedule one epoch late."""
    args = options_of_deit(name) if name == "imagenet_deit_small" else options_of(name, TIMM)
    optimizer = create_optimizer_v2(model, **optimizer_kwargs(cfg=args))
    scheduler, _ = create_scheduler_v2(optimizer, **scheduler_kwargs(args))
    mixes = bool(args.mixup or args.cutmix)
    criterion = LabelSmoothingCrossEntropy(args.smoothing)
    if mixes:
        criterion = (
            BinaryCrossEntropy(target_threshold=args.bce_target_thresh) if args.bce_loss else SoftTargetCrossEntropy()
        )
    average = ModelEmaV3(model, decay=args.model_ema_decay) if args.model_ema else None

    def loss(logits: Tensor, labels: Tensor, partners: Tensor, shares: Tensor) -> Tensor:
        if not mixes:
            return criterion(logits, labels)
        off = args.smoothing / CLASSES
        torch.set_default_dtype(torch.float64)  # of timm's one_hot
        first, second = (one_hot(y, CLASSES, 1 - args.smoothing + off, off) for y in (labels, partners))
        torch.set_default_dtype(torch.float32)
        return criterion(logits, first * shares + second * (1 - shares))

    def updated(epoch: int, number: int, per_epoch: int) -> nn.Module | None:
        if average is None:
            return None
        average.update(model, step=epoch * per_epoch + number + 1)
        return average.module

    return Source(model, optimizer, loss, lambda epoch: scheduler.step(epoch), updated, args.clip_grad)


def torchvision_source(name: str, model: nn.Module) -> Source:
    """As the train.py of torchvision's references is described: the optimizer's groups, warm-up and cosine, the EMA."""
    args = options_of(name, TORCHVISION)
    args.weight_decay = args.weight_decay if args.wd is None else args.wd
    parameters: Any = model.parameters()
    if args.norm_weight_decay is not None:
        norms, others = split_normalization_params(model)
        parameters = [{"params": norms, "weight_decay": args.norm_weight_decay}, {"params": others}]
    shared: dict[str, Any] = {"lr": args.lr, "weight_decay": args.weight_decay}
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, **shared)
    if args.opt == "sgd":
        optimizer = torch.optim.SGD(parameters, momentum=args.momentum, **shared)
    warmup = LinearLR(optimizer, start_factor=args.lr_warmup_decay, total_iters=args.lr_warmup_epochs)
    cosine = CosineAnnealingLR(optimizer, T_max=args.epochs - args.lr_warmup_epochs, eta_min=args.lr_min)
    scheduler = SequentialLR(optimizer, [warmup, cosine], milestones=[args.lr_warmup_epochs])
    criterion = nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)
    # The decay is adjusted to (images of a GPU x GPUs x steps / epochs), here those of this test.
    alpha = min(1.0, (1 - args.model_ema_decay) * GPUS * IMAGES * args.model_ema_steps / args.epochs)
    average = AveragedModel(model, avg_fn=lambda old, new, _: (1 - alpha) * old + alpha * new, use_buffers=True)

    def loss(logits: Tensor, labels: Tensor, partners: Tensor, shares: Tensor) -> Tensor:
        each = [nn.functional.one_hot(y, CLASSES).to(logits) for y in (labels, partners)]
        return criterion(logits, each[0] * shares + each[1] * (1 - shares))

    def updated(epoch: int, number: int, per_epoch: int) -> nn.Module:
        if number % args.model_ema_steps == 0:
            average.update_parameters(model)
            if epoch < args.lr_warmup_epochs:
                average.n_averaged.fill_(0)
        return average.module

    begun = [0]

    def begin_epoch(epoch: int) -> None:
        for _ in range(begun[0], epoch):
            scheduler.step()
        begun[0] = epoch

    return Source(model, optimizer, loss, begin_epoch, updated, args.clip_grad_norm)


def create_setup(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[TrainingSetup, nn.Module]:
    """The trainer's own objects for the recipe, in float64 and without the parts that draw by sample; and a copy of the
    model before the trainer has changed its layers."""
    create_new_model, plain = training_setup.create_new_model, list[nn.Module]()

    def in_float64(*arguments: Any, **options: Any) -> Any:
        model, *rest = create_new_model(*arguments, **options)
        plain.append(copy.deepcopy(model.double()))
        return (model, *rest)

    monkeypatch.setattr(training_setup, "create_new_model", in_float64)
    monkeypatch.setattr(training_setup, "rebuild_ddp_buckets", lambda *_: None)
    words = [name, *SMALL, *SMALL_MODELS[name], "--model.image-size", "32", "--model.eval-image-size", "32"]
    words += ["--augment.resize", "32", "--augment.crop-fraction", "none"]
    words += ["--data.train-limit", "256" if parse([name]).data.repeats > 1 else "32"]
    launch, config = prepare_environment(), parse(words)
    accelerator = connect(config, launch)
    setup = create_training_setup(config, launch, accelerator, splits_of(config))
    return setup, plain[0]


@contextmanager
def recording(setup: TrainingSetup) -> Iterator[list[dict[str, Any]]]:
    """What the trainer computes of each micro-batch: its input, labels, shares, logits and loss, in float64."""
    seen: list[dict[str, Any]] = []
    transform = setup.training.transform

    def in_float64(batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        inputs, targets = transform(batch)
        labels = batch["labels"]
        partners = labels.view(-1, 2).flip(1).flatten()
        shares = torch.ones(len(labels), 1, dtype=torch.float64)
        if targets.is_floating_point():  # mixed, in float32: the same with all digits
            shares = torch.where((labels != partners)[:, None], targets.gather(1, labels[:, None]).double(), 1.0)
            first, second = (nn.functional.one_hot(each, CLASSES).double() for each in (labels, partners))
            exact = first * shares + second * (1 - shares)
            torch.testing.assert_close(targets.double(), exact, rtol=0, atol=1e-6)
            targets = exact
        seen.append({"inputs": inputs.double(), "labels": labels, "partners": partners, "shares": shares})
        return seen[-1]["inputs"], targets

    object.__setattr__(setup.training, "transform", in_float64)
    try:
        yield seen
    finally:
        object.__setattr__(setup.training, "transform", transform)


def rates_of(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> dict[str, float]:
    """The learning rate of each parameter, by its name."""
    return {names[id(each)]: group["lr"] for group in optimizer.param_groups for each in group["params"]}


def names_of(model: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}


def close(found: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    """Assert that tensors of the same names differ by at most 1e-9 of the largest value. (Of that alone: a bias before
    a BatchNorm has no gradient but for rounding.)"""
    assert found.keys() == expected.keys()
    largest = max(float(other.detach().abs().max()) for other in expected.values())
    apart = {name: float((found[name] - other).detach().abs().max()) / largest for name, other in expected.items()}
    assert max(apart.values()) < 1e-9, f"{what}: {max(apart.items(), key=lambda each: each[1])}"


def source_of(name: str, model: nn.Module) -> Source:
    create = torchvision_source if PUBLISHED[name]["peer"] == "torchvision" else timm_source
    return create(name, model)


@pytest.mark.parametrize("name", PUBLISHED)
def test_updates_are_those_of_the_source(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two updates, that after the warm-up, where torchvision's EMA is still the model, and one more epoch."""
    setup, plain = create_setup(name, monkeypatch)
    config, accelerator = setup.config, setup.accelerator
    source = source_of(name, plain)
    mine, theirs = dict(setup.bare_model.named_parameters()), dict(source.model.named_parameters())
    guard = Guard(config, accelerator, setup.model, Stream([]).emit)
    run: Any = SimpleNamespace(state=TrainState(), guard=guard, meter=Meter(accelerator, ONE_LABEL), schedule_offset=0)
    losses: list[Tensor] = []
    run.meter.add = lambda logits, targets, weighted, weights: losses.append(weighted.double().sum())
    gradients: dict[str, Tensor] = {}
    step = setup.optimizer.step
    setup.optimizer.step = lambda: (gradients.update({n: p.grad.clone() for n, p in mine.items()}), step())
    models.set_train_mode(setup.model, config.model)
    source.model.train()
    per_epoch = setup.plan.updates_per_epoch
    warm = round(config.schedule.warmup_epochs)
    for epoch in (0, warm, warm + 1):
        setup.sampler.seek(epoch)
        run.state.epoch, run.state.epoch_samples, run.state.update = epoch, 0, epoch * per_epoch
        setup.schedule.step_update(run.state.update)
        source.begin_epoch(epoch)
        with recording(setup) as seen:
            for number, (_, micro_batches) in enumerate(setup.sampler.updates(setup.training.batches)):
                assert rates_of(setup.optimizer, names_of(setup.bare_model)) == pytest.approx(
                    rates_of(source.optimizer, names_of(source.model)), rel=1e-9
                )
                seen.clear(), losses.clear()
                assert update(setup, run, micro_batches, config.batch_size)
                run.state.update += 1
                source.optimizer.zero_grad()
                loss = torch.zeros(())
                for batch in halves(seen):  # of each GPU; DDP takes the mean of their gradients
                    one = source.loss(
                        source.model(batch["inputs"]), batch["labels"], batch["partners"], batch["shares"]
                    )
                    (one / GPUS).backward()
                    loss = loss + one.detach() / GPUS
                if source.clip is not None:
                    nn.utils.clip_grad_norm_(source.model.parameters(), source.clip)
                assert float(torch.stack(losses).sum()) / config.batch_size == pytest.approx(float(loss), rel=1e-9)
                close(gradients, {n: p.grad for n, p in theirs.items()}, "gradient of")
                source.optimizer.step()
                close({n: p.detach() for n, p in mine.items()}, {n: p.detach() for n, p in theirs.items()}, "weight")
                average = source.average(epoch, number, per_epoch)
                assert (average is None) == (setup.ema is None)
                if average is not None:
                    kept: dict[str, Tensor] = dict(setup.ema.module.named_parameters())
                    close(kept, dict(average.named_parameters()), "EMA of")
                if epoch > 0 or number == 1:
                    break


def halves(seen: list[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """The images of each GPU: a virtual batch."""
    whole = {key: torch.cat([each[key] for each in seen]) for key in seen[0]}
    assert len(whole["labels"]) == GPUS * IMAGES
    for start in range(0, GPUS * IMAGES, IMAGES):
        yield {key: each[start : start + IMAGES] for key, each in whole.items()}


@pytest.mark.parametrize("name", PUBLISHED)
def test_each_epoch_has_the_rate_of_the_source(name: str) -> None:
    config = parse([name])
    weights = nn.Parameter(torch.zeros(2, 2))
    source = source_of(name, nn.ParameterList([weights]))
    optimizer = torch.optim.SGD([weights], lr=config.optim.lr)
    epochs = round(config.epochs)
    schedule = LearningRate(config.schedule, optimizer, updates=epochs * 2, updates_per_epoch=2)
    for epoch in range(epochs):
        for number in (0, 1):
            schedule.step_update(epoch * 2 + number)
            source.begin_epoch(epoch)
            assert optimizer.param_groups[0]["lr"] == pytest.approx(source.optimizer.param_groups[0]["lr"], rel=1e-6)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_model_is_that_of_the_source(name: str) -> None:
    """Its layers, with their dropout and stochastic depth."""
    config = parse([name])
    with torch.device("meta"):
        mine = models.create_model(config.model, num_classes=CLASSES, channels=3, image_size=config.model.image_size)
        if PUBLISHED[name]["peer"] == "torchvision":
            theirs = torchvision.models.get_model(config.model.name.removeprefix("torchvision/"), num_classes=CLASSES)
        else:
            args = options_of_deit(name) if name == "imagenet_deit_small" else options_of(name, TIMM)
            path = args.drop_path or getattr(args, "drop_connect", None)
            theirs = timm.create_model(args.model, num_classes=CLASSES, drop_rate=args.drop, drop_path_rate=path)
    assert str(mine) == str(theirs)
