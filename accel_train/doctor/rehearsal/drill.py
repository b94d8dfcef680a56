"""The drill: a training of this recipe is killed and continued, and must have the weights of one that was not."""

from __future__ import annotations

import gc
import json
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from accel_train.checkpoint.directory import MANIFEST, checkpoint_path, list_updates
from accel_train.config.schema import Config, Stop, to_yaml
from accel_train.doctor.check import FAIL, NOT_CHECKED, PASS, WARN, Check, Examination, Finding
from accel_train.doctor.rehearsal.child import child_command, started
from accel_train.errors import counted, one_line
from accel_train.launch.agreement import broadcast_from_main

EVERY = 4  # updates between two checkpoints: killed after the first, compared at the second
SECONDS = 300.0  # of all three starts; collectives of the other ranks wait at least so long


class DrillError(Exception):
    """A training of the drill could not be continued; the message says what it printed last."""


def drill(exam: Examination) -> Finding:
    """Save, kill with SIGKILL, continue in a scratch folder; the weights must be those of an uninterrupted training."""
    exam.workload = None
    gc.collect()  # the device's memory is needed for the training that is killed
    if exam.accelerator.device.type == "cuda":
        import torch

        torch.cuda.empty_cache()
    return broadcast_from_main(exam.accelerator, lambda: _drill(exam))


def _drill(exam: Examination) -> Finding:
    expected = f"equal weights after update {2 * EVERY}, bit by bit"
    processes = exam.launch.local_world_size
    deadline = time.monotonic() + SECONDS
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=exam.folder) as name:
        scratch = Path(name)
        (scratch / "recipe.yaml").write_text(to_yaml(rehearsed(exam.config)))
        try:
            _train_until(scratch, "whole", processes, 2 * EVERY, deadline)
            _train_until(scratch, "killed", processes, EVERY, deadline)
            for update in list_updates(scratch / "killed" / "checkpoints"):
                if update > EVERY:  # a fast one got further before it was killed
                    shutil.rmtree(checkpoint_path(scratch / "killed" / "checkpoints", update))
            _train_until(scratch, "killed", processes, 2 * EVERY, deadline)
        except ValueError as error:
            return Finding(NOT_CHECKED, str(error), expected)
        except TimeoutError:
            return Finding(NOT_CHECKED, f"not done within {SECONDS:.0f} s", expected)
        except DrillError as error:
            return Finding(FAIL, str(error), expected, "Run the recipe for one epoch and look at its messages.")
        whole, resumed = (_weights(scratch / run) for run in ("whole", "killed"))
    found = f"killed and continued from update {EVERY}, {counted(processes, 'process')} on one host"
    if whole == resumed:
        return Finding(PASS, found, expected)
    if exam.accelerator.device.type != "cpu" and not exam.config.bitwise:
        advice = "A GPU's kernels may round differently each time; --bitwise true makes them equal (docs/bitwise.md)."
        return Finding(WARN, f"{found}: other weights", expected, advice)
    return Finding(FAIL, f"{found}: other weights", expected, "Please report it with this recipe.")


def rehearsed(config: Config) -> Config:
    """The same training, but nobody else hears of it, and it has enough updates even with few samples."""
    return replace(config, trackers=(), resume="auto", epochs=max(config.epochs, 2 * EVERY + 1), stop=Stop())


def _train_until(scratch: Path, run: str, processes: int, update: int, deadline: float) -> None:
    """Train in scratch/run until the checkpoint of `update` is there, then kill it with all its processes.

    Raises DrillError if it ends before, and TimeoutError.
    """
    words = [str(scratch / "recipe.yaml"), "--output-dir", str(scratch / run), "--checkpoint.keep", "4"]
    words += ["--checkpoint.every-updates", str(EVERY)]
    checkpoints = scratch / run / "checkpoints"
    with started(child_command(processes, "accel_train.train", *words)) as child:
        while update not in list_updates(checkpoints):
            if child.popen.poll() is not None and update not in list_updates(checkpoints):
                said = [line for line in child.text().splitlines() if line.strip()]
                raise DrillError(f"the training ended with exit code {child.popen.poll()}: {one_line(said[-1:], 200)}")
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(0.01)


def _weights(run: Path) -> object:
    """What the manifest of the last checkpoint says of the files of weights: size and SHA-256 of each."""
    manifest = json.loads((checkpoint_path(run / "checkpoints", 2 * EVERY) / MANIFEST).read_text())
    return {name: entry for name, entry in sorted(manifest["files"].items()) if name.endswith(".safetensors")}


DRILL = Check("drill", drill, seconds=0.0)
