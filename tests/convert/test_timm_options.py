"""Options of timm's train.py that need others beside them, or a reading of its code."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel_train.config.options import parse
from accel_train.convert.command_line import read_command
from accel_train.convert.recipe import convert, recipe_text
from accel_train.convert.translation import Translation

TIMM = "torchrun --nproc_per_node=4 train.py --model resnet18 --color-jitter 0.4 -b 64 "


def converted(command: str) -> Translation:
    return convert(read_command(command, "timm"))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "--mixup 0.2 --cutmix 1 --mixup-switch-prob 0.3 --mixup-off-epoch 9 --no-prefetcher",
            {"augment.mix-mode": "batch", "augment.switch-probability": 0.3, "augment.mix-epochs": 9},
        ),
        ("--mixup 0.2 --mixup-mode pair", {"augment.mix-mode": "pair", "augment.switch-probability": None}),
        (
            "--mixup 0.2 --cutmix-minmax 0.2 0.8 --mixup-mode elem",
            {"augment.mix-mode": "elem", "augment.cutmix-minmax": [0.2, 0.8], "augment.switch-probability": 0.5},
        ),
        ("--mixup-mode elem --mixup-off-epoch 3", {"augment.mix-mode": None, "augment.mix-epochs": None}),
        ("--reprob 0.3 --remode rand --recount 2", {"augment.erase-mode": "rand", "augment.erase-count": 2}),
        ("--remode rand --recount 2", {"augment.erase-mode": None, "augment.erase-count": None}),
        (
            "--bce-loss --bce-sum --bce-target-thresh 0.2 --bce-pos-weight 4",
            {"loss.bce-sum": True, "loss.bce-target-threshold": 0.2, "loss.bce-pos-weight": 4.0},
        ),
        ("--bce-loss --bce-sum --smoothing 0", {"loss.name": None, "loss.bce-sum": None}),
        ("--bce-loss --smoothing 0 --mixup 0.2", {"loss.name": "binary_cross_entropy"}),
        ("--resume last.pth.tar", {"epochs": 300}),
        ("--aug-repeats 3", {"data.repeats": 3}),
        (
            "--head-init-scale 0.001 --head-init-bias -6.9",
            {"model.head-init-scale": 0.001, "model.head-init-bias": -6.9},
        ),
        ("--aa augmix", {"augment.policy": "augmix-m3"}),
        ("--aa original-mstd0.5", {"augment.policy": "original-mstd0.5", "augment.color-jitter": None}),
        ("--aa 3a", {"augment.policy": "3a", "augment.color-jitter": 0.4}),
        ("--interpolation bilinear --train-interpolation bicubic", {"augment.train-interpolation": "bicubic"}),
        ("--train-interpolation bicubic --interpolation bicubic", {"augment.train-interpolation": None}),
        (
            "--sched tanh --lr-cycle-limit 3 --lr-cycle-mul 2 --epochs 10 --cooldown-epochs 5 --warmup-prefix",
            {"epochs": 80, "schedule.cycle-epochs": 10, "schedule.cycle-decay": 0.5, "schedule.cooldown-epochs": 5},
        ),
        ("--lr-cycle-mul 2 --epochs 10", {"epochs": 10, "schedule.cycle-epochs": None, "schedule.cycle-mul": None}),
        ("--sched plateau", {"schedule.threshold": 0.0001}),
        ("--train-interpolation lanczos", {"augment.train-interpolation": "lanczos"}),
        ("--no-aug --interpolation box", {"augment.crop": "squash", "augment.interpolation": "box"}),
        ("--train-crop-mode rkrc --scale 0.8 1", {"augment.crop": "rkrc", "augment.scale": [0.8, 1.0]}),
        ("--train-crop-mode rkrr", {"augment.crop": "rkrr", "augment.scale": [0.08, 1.0]}),
        ("--train-crop-mode rrc", {"augment.crop": "resized"}),
        ("--input-img-mode RGB", {"data.channels": None}),
        ("--input-size 1 224 224 --input-img-mode L", {"data.channels": 1}),
        (
            "--resume last.pth.tar --no-resume-opt --start-epoch 0",
            {"model.weights": "last.pth.tar"},
        ),
        ("--sched step --cooldown-epochs 10 --epochs 20", {"epochs": 20, "schedule.cooldown-epochs": None}),
    ],
)
def test_an_option_with_others(words: str, expected: dict[str, object], tmp_path: Path) -> None:
    translation = converted(TIMM + words)
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe_text(translation))
    parse([str(file)])  # a recipe that is accepted
    assert not translation.lost
    found = {key: translation.settings[key].value if key in translation.settings else None for key in expected}
    assert found == expected


@pytest.mark.parametrize(
    ("words", "lost"),
    [
        ("--aug-repeats 2.5", "--aug-repeats 2.5"),
        ("--mixup 0.2 --mixup-mode half", "--mixup-mode half"),
        ("--mixup 0.2 --reprob 0.1", "--reprob 0.1"),  # erased after mixing, unless --no-prefetcher
        ("--aa randaugment", "--aa randaugment"),
        ("--train-interpolation area", "--train-interpolation area"),
        ("--train-crop-mode rkr", "--train-crop-mode rkr"),
        ("--input-img-mode HSV", "--input-img-mode HSV"),
        ("--input-size 1 224 224 --input-img-mode RGB", "--input-img-mode RGB"),
        ("--start-epoch 3", "--start-epoch 3"),
        ("--resume last.pth.tar --no-resume-opt", "--no-resume-opt"),
    ],
)
def test_what_is_still_lost(words: str, lost: str) -> None:
    assert list(converted(TIMM + words).lost) == [lost]


def test_repeats_are_refused_on_one_process() -> None:
    assert "--aug-repeats 3.0" in converted("timm/train.py --color-jitter 0 --aug-repeats 3").lost
