"""docs/options.md and docs/recipes.md, from the code: `python tests/reference.py --write`. A test compares them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accel_train.cli.info.help import help_texts, written
from accel_train.config.option_types import choices, in_words, option_types
from accel_train.config.recipe import read_recipe, recipe_names
from accel_train.config.schema import Config, value

DOCS = Path(__file__).parent.parent / "docs"

# The value in an option's example, or the whole example if it begins with "--": an option that needs another one shows
# both. The others are true, the first choice that is not the default, or the default itself.
EXAMPLES: dict[str, str] = {
    "output-dir": "runs/first",
    "seed": "1",
    "epochs": "10",
    "batch-size": "128",
    "micro-batch-size": "16",
    "virtual-batch-size": "16",
    "eval-batch-size": "512",
    "resume": "must",
    "best-metric": "--data.val-fraction 0.1 --best-metric loss",
    "allow-change": "optim.lr epochs",
    "trackers": "tensorboard",
    "data.name": "--data.name folder --data.root photos",
    "data.root": "--data.name folder --data.root photos",
    "data.val-fraction": "0.1",
    "data.test-fraction": "--data.name folder --data.root photos --data.test-fraction 0.1",
    "data.train-limit": "1000",
    "data.test-limit": "100",
    "data.skip-unreadable": "--data.name folder --data.root photos --data.skip-unreadable unreadable-photos.txt",
    "data.max-pixels": "500000000",
    "data.range": "--data.name folder --data.root scans --data.range 0 4095",
    "data.workers": "4",
    "data.image-size": "--data.name synthetic --data.image-size 64",
    "data.channels": "--data.name folder --data.root scans --data.channels 1",
    "data.classes": "--data.name synthetic --data.classes 100",
    "data.train-images": "--data.name synthetic --data.train-images 10000",
    "data.test-images": "--data.name synthetic --data.test-images 1000",
    "augment.resize": "--augment.resize 256 --model.image-size 224",
    "augment.crop": "resized",
    "augment.pad": "--augment.crop random --augment.pad 4",
    "augment.pad-mode": "--augment.crop random --augment.pad 4 --augment.pad-mode reflect",
    "augment.scale": "--augment.crop resized --augment.scale 0.35 1",
    "augment.ratio": "--augment.crop resized --augment.ratio 0.9 1.1",
    "augment.interpolation": "bicubic",
    "augment.flip": "0.5",
    "augment.vertical-flip": "0.5",
    "augment.color-jitter": "0.4 0.4 0.4 0.1",
    "augment.color-jitter-probability": "--augment.color-jitter 0.4 --augment.color-jitter-probability 0.8",
    "augment.grey": "0.2",
    "augment.blur": "0.1",
    "augment.randaugment-ops": "--augment.policy randaugment --augment.randaugment-ops 3",
    "augment.randaugment-magnitude": "--augment.policy randaugment --augment.randaugment-magnitude 12",
    "augment.erase": "0.25",
    "augment.mixup": "0.2",
    "augment.cutmix": "1.0",
    "augment.mix-probability": "--augment.mixup 0.2 --augment.mix-probability 0.5",
    "augment.mean": "0.5 0.5 0.5",
    "augment.std": "0.25 0.25 0.25",
    "model.name": "resnet18",
    "model.kwargs": """'{"stem_type": "deep"}'""",
    "model.pretrained": "--model.name resnet18 --model.pretrained true",
    "model.weights": "runs/first",
    "model.image-size": "224",
    "model.freeze-body": "--model.name resnet18 --model.pretrained true --model.freeze-body true",
    "model.dropout": "0.2",
    "model.drop-path": "--model.name vit_small_patch16_224 --model.drop-path 0.1",
    "optim.name": "adamw",
    "optim.lr": "0.01",
    "optim.weight-decay": "5e-4",
    "optim.momentum": "0.95",
    "optim.betas": "--optim.name adamw --optim.betas 0.9 0.95",
    "optim.eps": "--optim.name adamw --optim.eps 1e-6",
    "optim.layer-decay": "--model.name vit_small_patch16_224 --optim.layer-decay 0.75",
    "optim.clip": "1.0",
    "optim.clip-mode": "--optim.clip 0.02 --optim.clip-mode agc",
    "schedule.name": "--schedule.name cosine",
    "schedule.warmup-epochs": "0.5",
    "schedule.warmup-lr": "--schedule.warmup-epochs 0.5 --schedule.warmup-lr 1e-5",
    "schedule.min-lr": "--schedule.name cosine --schedule.min-lr 1e-5",
    "schedule.step-epochs": "--schedule.name step --schedule.step-epochs 10",
    "schedule.milestones": "--schedule.name multistep --schedule.milestones 10 15",
    "schedule.decay": "--schedule.name step --schedule.decay 0.5",
    "schedule.power": "--schedule.name poly --schedule.power 0.9",
    "schedule.patience-epochs": "--schedule.name plateau --data.val-fraction 0.1 --schedule.patience-epochs 5",
    "loss.name": "bce",
    "loss.label-smoothing": "0.1",
    "ema.decay": "--ema.enabled true --ema.decay 0.999",
    "ema.warmup": "--ema.enabled true --ema.warmup true",
    "stop.patience-epochs": "--data.val-fraction 0.1 --stop.patience-epochs 5",
    "stop.hours": "8",
    "checkpoint.every-updates": "500",
    "checkpoint.every-seconds": "1800",
    "checkpoint.keep": "5",
    "checkpoint.milestone-epochs": "10",
    "on-nonfinite": "skip",
}
TITLES = {
    "": "The run",
    "data": "Data",
    "augment": "Augmentation",
    "model": "Model",
    "optim": "Optimizer",
    "schedule": "Learning-rate schedule",
    "loss": "Loss",
    "ema": "Average of the weights (EMA)",
    "stop": "An early end",
    "checkpoint": "Checkpoints",
}


def example(key: str, kind: Any, default: Any) -> str:
    """How the option is typed, for instance."""
    given = EXAMPLES.get(key)
    if given is not None:
        return given if given.startswith("--") else f"--{key} {given}"
    if kind is bool:
        return f"--{key} true"
    others = [choice for choice in choices(kind) if choice != default]
    return f"--{key} {others[0] if others else written(default)}"


def options_page() -> str:
    kinds, texts, defaults = option_types(), help_texts(), Config()
    lines = [
        "# Options",
        "",
        "<!-- Written by python tests/reference.py --write -->",
        "",
        "All options of `accel-train train RECIPE`. In a recipe they are keys of a YAML mapping, with `_` for `-`:",
        "`optim: {weight_decay: 0.01}`. The defaults are those without a recipe; `accel-train train RECIPE --help`",
        "shows the recipe's own.",
    ]
    for group in dict.fromkeys(("", *(key.partition(".")[0] for key in kinds if "." in key))):
        lines += ["", f"## {TITLES.get(group, group.capitalize())}", ""]
        for key, kind in kinds.items():
            if (key.partition(".")[0] if "." in key else "") != group:
                continue
            default = value(defaults, key)
            words = in_words(kind).replace("one of ", "")
            without = "none" if default is None else written(default)
            code = example(key, kind, default)
            lines += [f"### `--{key}`", "", texts[key].replace("|", "\\|"), ""]
            lines += [f"- Value: {words}", f"- Default: {without}", f"- Example: `{code}`", ""]
        lines.pop()
    return "\n".join(lines) + "\n"


def recipes_page() -> str:
    lines = [
        "# Recipes",
        "",
        "<!-- Written by python tests/reference.py --write -->",
        "",
        "The packaged recipes, as `accel-train recipes NAME` prints them. A recipe of your own may begin with one of",
        "them: `base: mnist_cnn`. The accuracies are the publications' unless the text says that they were measured.",
    ]
    for name in recipe_names():
        recipe = read_recipe(name)
        about = recipe.about
        lines += ["", f"## {name}", "", f"{about.get('reproduces', '')}", ""]
        lines += [f"- Expected accuracy: {about.get('accuracy', 'not known')}"]
        lines += [f"- Runs on: {about['runs_on']}"] if about.get("runs_on") else []
        lines += ["", "```yaml", recipe.text.rstrip(), "```"]
    return "\n".join(lines) + "\n"


def pages() -> Iterator[tuple[Path, str]]:
    yield DOCS / "options.md", options_page()
    yield DOCS / "recipes.md", recipes_page()


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python tests/reference.py --write")
    for path, text in pages():
        path.write_text(text)
        print(path)
