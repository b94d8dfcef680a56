"""What has come out of a run: result.json, the final screen, and the commands to try next."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from accel_train import __version__
from accel_train.checkpoint.train_state import TrainState
from accel_train.config.compatibility import FORMAT, learning_settings
from accel_train.config.schema import Config, best_metric
from accel_train.data.order.plan import Plan
from accel_train.data.sources.files.images import png_file
from accel_train.data.sources.splits import Splits, label_numbers
from accel_train.errors import UserError, counted
from accel_train.files import open_to_write
from accel_train.launch.environment import Launch
from accel_train.launch.process import LAUNCHERS, launcher_command, start_folder
from accel_train.records.cost import cost_text
from accel_train.records.metrics import Evaluation, figures_for, headlines
from accel_train.user_code.reference import GIVEN


def result_of(
    config: Config,
    plan: Plan,
    train_images: int,
    state: TrainState,
    last: dict[str, Evaluation],
    *,
    multi_label: bool = False,
) -> dict[str, Any]:
    """Return the contents of result.json without the times of the last start.

    `last`: the newest evaluations, "test" and "test (ema)" among them.
    """
    test, ema = last.get("test"), last.get("test (ema)")
    metrics = figures_for(config.metrics, multi_label=multi_label)
    metric = best_metric(config, multi_label=multi_label)
    result: dict[str, Any] = {
        "format": FORMAT,
        "version": __version__,
        "recipe": config.recipe,
        "epochs": plan.epochs_until(state.epoch, state.epoch_samples),
        "updates": state.update,
        "left_out_updates": len(state.left_out),
        "world_size": plan.processes,
        "division": plan.division,
        "train_images": train_images,
        "test_images": test.count if test else 0,
        **{f"test_{metric.name}": test.figures[metric.name] if test else None for metric in metrics},
        **{
            f"ema_test_{metric.name}": ema.figures[metric.name] if ema else None
            for metric in metrics
            if metric.headline
        },
        "stopped_by": state.stopped_by(config, plan),
        "best_val_accuracy": state.best_figure if metric == "accuracy" else None,
        "best_metric": metric,
        "best_value": state.best_figure,
        "best_update": state.best_update,
        "images_per_second": state.timed_samples / state.train_seconds if state.timed_samples else None,
        "train_seconds": state.train_seconds,
    }
    if test:
        result |= test.as_record()
    return result | {"settings": learning_settings(config)}


def final_figures(
    result: Mapping[str, Any],
    state: TrainState,
    last: Mapping[str, Evaluation],
    stopped: str | None,
    run: Path,
    chosen: Sequence[str] = (),
) -> dict[str, str]:
    """Return what the final screen shows of a run, by name. `result`: of result.json, with the times; `stopped`: of
    `stopped_text`; `chosen`: by --metrics."""
    figures = {
        f"{name} {metric}": shown
        for name, evaluation in last.items()
        for metric, shown in headlines(evaluation.figures, chosen).items()
        if metric != "loss"
    }
    if state.best_figure is not None:
        name = str(result["best_metric"])
        shown = headlines({name: state.best_figure}, chosen).get(name, f"{state.best_figure:.4f}")
        use = "the last weights" if state.best_update == state.update else "to use it, add --checkpoint best"
        figures[f"best val {name}"] = f"{shown} after epoch {state.best_epoch}; {use}"
    if state.timed_samples:
        figures["speed"] = f"{result['images_per_second']:,.0f} images/s, {state.train_seconds:.1f} s of training"
        if (warm_up := result["warm_up_seconds"]) is not None and warm_up > 1:  # compilation, say
            figures["speed"] += f" after {warm_up:.1f} s of the first update"
    figures["time"] = cost_text(result["cost"])
    if state.left_out:
        figures["skipped"] = f"{counted(len(state.left_out), 'update')} not finite"
    figures["run"] = str(run)
    return figures if stopped is None else figures | {"stopped": stopped}


def stopped_text(config: Config, plan: Plan, state: TrainState, *, multi_label: bool) -> str | None:
    """Why the run has ended before its last epoch, for the user; None if it has not."""
    stop, reason = config.stop, state.stopped_by(config, plan)
    if reason == "updates":
        return f"by --stop.updates {stop.updates}"
    if reason == "hours":
        return f"by --stop.hours {stop.hours:g}, after {state.wall_seconds / 3600:.2g} hours"
    if reason != "patience":
        return None
    metric = best_metric(config, multi_label=multi_label)
    best = "none" if state.best_figure is None else f"{state.best_figure:.4f} after update {state.best_update}"
    epochs = f"{stop.patience_epochs} epochs" if stop.patience_epochs != 1 else "an epoch"
    return f"by --stop.patience-epochs, after {epochs} without a better val {metric} (best: {best})"


def next_steps(run: Path, image: Path | None) -> dict[str, str]:
    """Return commands to try after a run, by what they do. `image`: a file to try the model on."""
    if GIVEN:  # only a program has the objects
        model, data = (f", {name}=…" * (f"{name}.name" in GIVEN) for name in ("model", "data"))
        return {"use it": f"load_run({str(run)!r}{model})", "evaluate": f"evaluate({str(run)!r}{model}{data})"}
    program, folder = typed_program(), shlex.quote(str(run))
    return {
        "evaluate": f"{program} evaluate {folder}",
        "predict": f"{program} predict {folder} {shlex.quote(str(image)) if image else 'IMAGE…'}",
        "report": f"{program} report {folder}",
        "other recipes": f"{program} recipes",
    }


def typed_program() -> str:
    """Return how to type this program's name: after `make train` it is not on the PATH."""
    if shutil.which("accel-train"):
        return "accel-train"
    if Path(sys.argv[0]).name == "accel-train":
        return shlex.quote(sys.argv[0])
    return f"{shlex.quote(sys.executable)} -m accel_train"


FOLDER, COUNT = "examples", 5  # where example images are written, and how many


def example_image(splits: Splits, run: Path) -> Path | None:
    """Return the path of an image that the model was not trained on, or None.

    If the data is not in image files, its first test images are written to RUN/examples, with their class in the name:
    test-0-is-cat.png.
    """
    source = splits.test or splits.validation
    if source is None:
        return None
    if (file := Path(source.name(0))).is_file():
        return file
    if splits.full_scale != 255 or splits.channels not in (1, 3):  # no image file has such pixels
        return None
    split = "test" if splits.test else "validation"
    written: list[Path] = []
    try:
        (run / FOLDER).mkdir(exist_ok=True)
        for id in range(min(COUNT, len(source))):
            names = [splits.classes[label] for label in label_numbers(source.labels[id])] or ["nothing"]
            name = re.sub(r"[^\w.-]+", "_", "-".join(names))
            path = run / FOLDER / f"{split}-{id}-is-{name[:100]}.png"
            with open_to_write(path, "wb") as opened:
                opened.write(png_file(torch.as_tensor(source.fetch([id])[0]).cpu()))
            written.append(path)
    except (OSError, UserError):  # a full disk or an unreadable image: examples are not essential
        pass
    return written[0] if written else None


def resume_command(launch: Launch, run: Path, *options: str) -> str:
    """What a person types to resume the run in the directory `run`, which was launched as `launch` says.

    `options`: words of settings that differ from the run's own.
    """
    if GIVEN:
        words = "".join(f", {word!r}" for word in options)
        return f"the same call of train, with output_dir={str(run)!r}{words}"
    recipe = shlex.join([f"{run}/config.yaml", "--output-dir", str(run), *options])
    program = f"python -m accel_train.train {recipe}"
    if start_folder() is not None:  # a job script started it; accel-train after-job knows more
        if "PBS_JOBID" in os.environ:
            option = "-V" if "'" in recipe else "-v TRAIN"  # qsub -v turns quotes into backslashes
            return f"TRAIN={shlex.quote(recipe)} qsub {option} … pbs/train.pbs"
        return f"sbatch … slurm/train.sbatch {recipe}"
    if launch.launcher == "none":
        return f"{typed_program()} train {recipe}"
    if launch.launcher in ("accelerate", "torchrun"):
        unknown = f"{'accelerate launch' if launch.launcher == 'accelerate' else 'torchrun'} … -m accel_train.train"
        others = ", and so on each host" if launch.world_size > launch.local_world_size else ""
        return f"{shlex.join(_launcher_words()) or unknown} {recipe}{others}"
    if launch.launcher == "srun":
        return f"srun --ntasks={launch.world_size} … {program}"
    if launch.launcher == "environment":
        return f"{program}, with RANK, WORLD_SIZE and MASTER_ADDR set as before"
    return f"mpirun -n {launch.world_size} … {program}"


def _launcher_words() -> list[str]:
    """The launcher's command line up to this program's own arguments, or [] if it cannot be read."""
    words, ours = launcher_command(), sys.argv[1:]
    if not ours or words[-len(ours) :] != ours:
        return []
    head = words[: -len(ours)] + ["train"] * (ours[0] == "train")  # of `-m accel_train train`
    if len(head) > 1 and Path(head[1]).name in LAUNCHERS:  # python …/bin/accelerate launch
        name = Path(head[1]).name
        head = [name if shutil.which(name) else head[1], *head[2:]]
    return head
