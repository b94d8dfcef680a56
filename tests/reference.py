"""Write docs/options.md and docs/recipes.md from the code: `python tests/reference.py --write`.

`make docs` does so before it builds the site; git does not have these pages.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from accel_train.cli.help import help_texts, written
from accel_train.config.declaration import ONE_START, DecidesSamples, Free
from accel_train.config.options import parse
from accel_train.config.recipe import read_recipe, recipe_names
from accel_train.config.schema import Config, choices, declared, in_words, option_types, value

DOCS = Path(__file__).parent.parent / "docs"
BUILT = ("options.md", "recipes.md", "example_report.html")
"""The files of docs/ that `make docs` writes. The last one is from benchmarks/example_report.py."""

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
    "eval-every-updates": "1000",
    "best-metric": "--data.val-fraction 0.1 --best-metric loss",
    "allow-change": "optim.lr epochs",
    "trackers": "tensorboard",
    "data.name": "--data.name folder --data.root photos",
    "data.root": "--data.name folder --data.root photos",
    "data.only-classes": "3 8",
    "data.stage": "--data.name wds --data.root s3://bucket/shards --data.stage /scratch/shards",
    "data.val-fraction": "0.1",
    "data.test-fraction": "--data.name folder --data.root photos --data.test-fraction 0.1",
    "data.train-limit": "1000",
    "data.test-limit": "100",
    "data.skip-unreadable": "--data.name folder --data.root photos --data.skip-unreadable unreadable-photos.txt",
    "data.workers": "4",
    "data.channels": "--data.name folder --data.root scans --data.channels 1",
    "augment.resize": "--augment.resize 256 --model.image-size 224",
    "augment.crop-fraction": "--augment.crop-fraction 0.95 --model.image-size 224",
    "augment.crop": "resized",
    "augment.pad": "--augment.crop random --augment.pad 4",
    "augment.pad-mode": "--augment.crop random --augment.pad 4 --augment.pad-mode reflect",
    "augment.scale": "--augment.crop resized --augment.scale 0.35 1",
    "augment.ratio": "--augment.crop resized --augment.ratio 0.9 1.1",
    "augment.interpolation": "bicubic",
    "augment.train-interpolation": "random",
    "augment.policy": "rand-m9-mstd0.5-inc1",
    "augment.own": "mine.py:augment",
    "augment.erase-mode": "--augment.erase 0.25 --augment.erase-mode pixel",
    "data.repeats": "3",
    "data.order": "--data.name wds --data.root shards --data.order shards",
    "data.open-shards": "--data.name wds --data.root shards --data.order shards --data.open-shards 32",
    "augment.flip": "0.5",
    "augment.vertical-flip": "0.5",
    "augment.randaugment-ops": "--augment.policy randaugment --augment.randaugment-ops 3",
    "augment.randaugment-magnitude": "--augment.policy randaugment --augment.randaugment-magnitude 12",
    "augment.erase": "0.25",
    "augment.mixup": "0.2",
    "augment.cutmix": "1.0",
    "augment.mix-probability": "--augment.mixup 0.2 --augment.mix-probability 0.5",
    "augment.mix-mode": "--augment.mixup 0.8 --augment.mix-mode batch",
    "augment.mean": "0.5 0.5 0.5",
    "augment.std": "0.25 0.25 0.25",
    "model.name": "resnet18",
    "model.kwargs": """'{"stem_type": "deep"}'""",
    "model.pretrained": "--model.name resnet18 --model.pretrained true",
    "model.weights": "runs/first",
    "model.image-size": "224",
    "data.image-column": "img",
    "data.label-column": "fine_label",
    "model.eval-image-size": "--model.image-size 176 --model.eval-image-size 224 --augment.resize 232",
    "model.freeze-body": "--model.name resnet18 --model.pretrained true --model.freeze-body true",
    "model.freeze": "--model.name resnet18 --model.pretrained true --model.freeze conv1 layer1",
    "model.freeze-epochs": "--model.pretrained true --model.freeze-body true --model.freeze-epochs 3",
    "model.dropout": "0.2",
    "model.drop-path": "--model.name vit_small_patch16_224 --model.drop-path 0.1",
    "optim.name": "adamw",
    "optim.lr": "0.01",
    "optim.weight-decay": "5e-4",
    "optim.norm-weight-decay": "--optim.decay-all true --optim.norm-weight-decay 0",
    "optim.momentum": "0.95",
    "optim.betas": "--optim.name adamw --optim.betas 0.9 0.95",
    "optim.eps": "--optim.name adamw --optim.eps 1e-6",
    "optim.layer-decay": "--model.name vit_small_patch16_224 --optim.layer-decay 0.75",
    "optim.kwargs": """--optim.name adamw --optim.kwargs '{"amsgrad": true}'""",
    "optim.head-lr": "--model.pretrained true --optim.lr 0.001 --optim.head-lr 0.01",
    "optim.clip": "1.0",
    "schedule.name": "--schedule.name cosine",
    "schedule.warmup-epochs": "0.5",
    "schedule.warmup-lr": "--schedule.warmup-epochs 0.5 --schedule.warmup-lr 1e-5",
    "schedule.warmup-prefix": "--schedule.warmup-epochs 5 --schedule.warmup-prefix false",
    "schedule.min-lr": "--schedule.name cosine --schedule.min-lr 1e-5",
    "schedule.step-epochs": "--schedule.name step --schedule.step-epochs 10",
    "schedule.milestones": "--schedule.name multistep --schedule.milestones 10 15",
    "schedule.decay": "--schedule.name step --schedule.decay 0.5",
    "schedule.patience-epochs": "--schedule.name plateau --data.val-fraction 0.1 --schedule.patience-epochs 5",
    "loss.name": "bce",
    "loss.label-smoothing": "0.1",
    "loss.bce-target-threshold": "--loss.name bce --loss.bce-target-threshold 0.2",
    "ema.decay": "--ema.enabled true --ema.decay 0.999",
    "ema.every-updates": "--ema.enabled true --ema.every-updates 32",
    "ema.scale-decay": "--schedule.name cosine --ema.enabled true --ema.scale-decay true",
    "ema.after-epochs": "--ema.enabled true --ema.after-epochs 1",
    "stop.patience-epochs": "--data.val-fraction 0.1 --stop.patience-epochs 5",
    "stop.updates": "10000",
    "stop.hours": "8",
    "checkpoint.every-updates": "500",
    "checkpoint.every-seconds": "1800",
    "checkpoint.keep": "5",
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


def changes(key: str) -> list[str]:
    """Whether the option may change when a run goes on; [] for most, which need --allow-change."""
    free = dict(declared(Free)).get(key)
    if key in dict(declared(DecidesSamples)):
        return ["- In a run that goes on: changes between two epochs only, with `--allow-change`"]
    if free is None or free is ONE_START:
        return []
    schedules = f"; not with the schedule {' or '.join(free.unless)}" if free.unless else ""
    return [f"- In a run that goes on: may change ({free.reason}{schedules})"]


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
            lines += [f"- Value: {words}", f"- Default: {without}", f"- Example: `{code}`"]
            lines += [*changes(key), ""]
        lines.pop()
    return "\n".join(lines) + "\n"


def published() -> dict[str, Any]:
    """What the options of published trainings are in the recipes: tests/published.yaml."""
    found: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "published.yaml").read_text(encoding="utf-8"))
    return found


def in_table(setting: Any) -> str:
    """A value as the tables show it."""
    if isinstance(setting, (list, tuple)):
        return " ".join(f"{each:.5g}" if isinstance(each, float) else str(each) for each in setting) or "none"
    words = {None: "none", True: "true", False: "false"} if setting is None or isinstance(setting, bool) else {}
    return words.get(setting, f"{setting:g}" if isinstance(setting, float) else str(setting)).replace("|", "\\|")


def comparison(name: str) -> Iterator[str]:
    """The recipe beside its source, option by option; nothing for a recipe that is not in published.yaml."""
    of = published()["recipes"].get(name)
    if of is None:
        return
    config = parse([name])
    yield from ("", "Option by option, compared with:", "", *(f"- {source}" for source in of["sources"]), "")
    yield "A command with the values of these sources:" if of.get("composed") else "The command:"
    yield from ("", "```text", of["command"], "```", "", "| there | value | here | |", "|---|---|---|---|")
    for option, row in of["rows"].items():
        here = ", ".join(f"`{key}` {in_table(value(config, key))}" for key in row.get("here", {}))
        yield f"| {option} | {in_table(row['there'])} | {here} | {row.get('why', 'equal')} |".replace("  ", " ")


def recipes_page() -> str:
    lines = [
        "# Recipes",
        "",
        "<!-- Written by python tests/reference.py --write -->",
        "",
        "The packaged recipes, as `accel-train recipes NAME` prints them. A recipe of your own may begin with one of",
        "them: `base: mnist_cnn`. The accuracies are the publications' unless the text says that they were measured.",
        "",
        "Some recipes are followed by a table: each option of the source, its value there and here, and whether both",
        "are equal. Tests compare the tables with the recipes, and updates of these recipes with the code of timm,",
        "torchvision and torch on the same mixed images and weights: loss, gradients, learning rates, weights and EMA.",
        "Which images and shares are drawn differs: random numbers are functions of (seed, epoch, sample) here.",
    ]
    for name in recipe_names():
        recipe = read_recipe(name)
        about = recipe.about
        lines += ["", f"## {name}", "", f"{about.get('reproduces', '')}", ""]
        lines += [f"- Expected accuracy: {about.get('accuracy', 'not known')}"]
        lines += [f"- Runs on: {about['runs_on']}"] if about.get("runs_on") else []
        lines += ["", "```yaml", recipe.text.rstrip(), "```", *comparison(name)]
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
