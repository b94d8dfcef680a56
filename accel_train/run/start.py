"""What a start begins from: a finished run, its weights (published, a file's, its own checkpoint's), its data, and the
position of a run that goes on.

result.json says that a run is finished: either nothing is left to do, or the start is refused. The content is checked:
a damaged result does not finish the run, and the result of other settings is not the result that is asked for.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from accel_train import __version__
from accel_train.checkpoint.directory import MANIFEST, BrokenError, find_newest_checkpoint, verify_files
from accel_train.checkpoint.reading import find_weights
from accel_train.checkpoint.state import TrainState
from accel_train.checkpoint.store import Checkpoints
from accel_train.config.compatibility import END_KEYS, affects_learning, check_format, differences, learning_fingerprint
from accel_train.config.schema import Config, Origin
from accel_train.data.order import create_draws
from accel_train.data.sources.load import Splits, splits_of
from accel_train.errors import UserError, counted
from accel_train.files import json_object, read_regular_file, sha256
from accel_train.launch.agreement import broadcast_from_main, check_agreement, fail_together
from accel_train.models.weights import Weights, check_file
from accel_train.optim.bitwise import what_bits_depend_on
from accel_train.optim.schedule import check_schedule
from accel_train.ownership.claim import Claim, claim_run
from accel_train.ownership.owner import Lease, is_late
from accel_train.records.directory import begin_start, code_facts
from accel_train.records.model_info import FILE, ModelInfo, read_model_info
from accel_train.records.summary import check_best_metric
from accel_train.training_setup import TrainingSetup
from accel_train.user_code import parse_reference

RESULT = "result.json"


def find_result(run: Path, config: Config) -> Mapping[str, Any] | None:
    """The content of result.json if the folder `run` holds a finished run, which has done all that `config` asks for;
    None if there is none. Changes nothing on the disk.

    A result that an earlier owner wrote after a later one had begun to train does not finish the run.

    Raises UserError if its settings differ from `config`.
    """
    path = run / RESULT
    if not path.is_file():
        return None
    try:
        content = read_regular_file(path, follow=True)
    except OSError as error:
        raise UserError(
            f"{path}, the result of a finished run, cannot be read ({error.strerror}). Give another --output-dir."
        ) from None
    result = _read(path, content)
    if result is not None and is_late(run, result):
        return None
    if result is None:
        raise UserError(
            f"{path} is damaged. Delete it, and the same command goes on from the run's newest checkpoint, if there is "
            "one; or give another --output-dir."
        )
    changes = differences(result["settings"], config)
    changed = [key for key in changes if key in END_KEYS or affects_learning(key, config.schedule.name)]
    if changed:
        differs = "; ".join(f"{key}: {changes[key]}" for key in changed)
        raise UserError(
            f"{run} holds a finished run of {counted(result['epochs'], 'epoch')}, which differs from this start's "
            f"settings: {differs}. Give another --output-dir, for a new run; or to go on there from the end of this "
            f"one, with --resume {shlex.quote(str(run))}"
        )
    return result


def _read(path: Path, content: bytes) -> dict[str, Any] | None:
    """The content of result.json, or None if it is not a result. Raises UserError for one of another version."""
    result = json_object(content)
    kinds: dict[str, Any] = {"recipe": str, "epochs": (int, float), "updates": int}
    if result is None or not all(isinstance(result.get(name), kind) for name, kind in kinds.items()):
        return None
    check_format(path, result.get("format"), result.get("version"))
    return result if isinstance(result.get("settings"), dict) else None


@dataclass(frozen=True)
class StartPoint:
    """What a run begins from."""

    config: Config
    """With its origin."""
    weights: Weights | None = None
    """To be loaded; None: random or published ones, or those of a checkpoint."""
    resumes: bool = False
    """The weights come from a checkpoint. Those that the run began from are not needed any more, and the model's trial
    not again."""


def find_start(config: Config, accelerator: Accelerator) -> StartPoint:
    """Find what the run of `config` begins from. Collective; one process downloads, and the others wait.

    A run that has a checkpoint does not need the file: what has to be known of it is in its model.json.
    Raises UserError, also if the processes read different weights.
    """
    path = config.model.weights
    if path is None:
        return StartPoint(config, resumes=broadcast_from_main(accelerator, lambda: _has_checkpoint(config)))
    resumes, origin, found = broadcast_from_main(accelerator, lambda: _on_main(config, path))
    config = dataclasses.replace(config, origin=origin)
    if found is None:
        return StartPoint(config, resumes=resumes)
    sha = origin.sha256
    if not accelerator.is_main_process:
        try:  # another node may have another file of the same name
            sha = sha256(found.file)
        except OSError as error:
            sha = f"not readable ({error.strerror})"
    check_agreement(accelerator, **{"model.weights": sha})
    return StartPoint(config, None if resumes else found, resumes)


def claim_directory(config: Config, accelerator: Accelerator, stopped: Callable[[], str]) -> Lease:
    """Make this start the owner of the run's directory; the marker with which an earlier start asked for another one
    goes. Collective. `stopped`: returns why this start is to end, or "", while it waits for an owner that may be dead.

    Raises UserError if another start owns the run.
    """
    claim = Claim(config.output_dir, stopped, recipe=config.recipe, take_over=config.take_over)
    lease = claim_run(accelerator, claim)
    if accelerator.is_main_process:
        begin_start(lease.directory)
    return lease


def load_data(config: Config, accelerator: Accelerator, stopped: Callable[[], str] = lambda: "") -> Splits:
    """The dataset with its splits. Raises UserError unless all processes have the same.

    `stopped`: returns why this start is to end, or "", while files are copied to the node.
    """
    check_agreement(accelerator, version=__version__, **code_facts(config))  # before the user's own code runs

    def load() -> Splits:
        splits = splits_of(config)
        if config.data.order == "full":
            return splits
        from accel_train.data.loading import shards_of

        bounds = shards_of(config.data, splits.train).numpy().tobytes()
        return dataclasses.replace(splits, table=hashlib.sha256(bounds + splits.table.encode()).hexdigest())

    # Only a user's Dataset may be loaded by all processes together; then they find its mistakes together.
    is_users = parse_reference("data.name", config.data.name) is not None
    if config.data.is_staged and not is_users:
        from accel_train.data.sources.staging import stage_on_all_nodes

        stage_on_all_nodes(config.data, accelerator, stopped)
    splits = load() if is_users else fail_together(accelerator, load)
    check_schedule(config.schedule, splits)
    check_best_metric(config, splits)
    draws = create_draws(config, splits.train.labels)
    drawn = {} if draws is None else {"classes of the training samples": draws.digest()}
    check_agreement(
        accelerator,
        configuration=learning_fingerprint(config),
        samples=str(len(splits.train)),
        classes=" ".join(splits.classes),
        table=splits.table,
        **drawn,
        **(what_bits_depend_on(accelerator) if config.bitwise else {}),
    )
    return splits


def restore(setup: TrainingSetup, checkpoints: Checkpoints) -> tuple[TrainState, bool]:
    """The position of the run, and whether it resumes from a checkpoint. Raises UserError."""
    config, accelerator = setup.config, setup.accelerator
    broadcast_from_main(accelerator, checkpoints.check_writable)
    # The model does not have the weights that the run began from: only a checkpoint's will do.
    waits = setup.from_checkpoint and config.resume == "auto"
    restored = checkpoints.restore("must" if waits else config.resume, config.allow_change)
    state = restored or TrainState()
    state.check_position(setup.plan.samples, checkpoints.folder)
    return state, restored is not None


def _on_main(config: Config, path: Path) -> tuple[bool, Origin, Weights | None]:
    """Whether the run resumes, its origin, and the weights that `path` names, unless the run has begun from them."""
    resumes = _has_checkpoint(config)
    is_finished = config.output_dir is not None and (config.output_dir / "result.json").is_file()
    recorded = _recorded(config) if resumes or is_finished else Origin()
    if recorded.weights == str(path):
        return resumes, recorded, None
    weights, info = find_file(path)
    try:
        origin = Origin(weights=str(path), sha256=sha256(weights.file))
    except OSError as error:
        raise UserError(f"--model.weights: {weights.file} cannot be read ({error.strerror}).") from error
    if info is not None:
        origin = dataclasses.replace(origin, image_size=info.training_size, mean=info.mean, std=info.std)
    return resumes, origin, weights


def find_file(path: Path) -> tuple[Weights, ModelInfo | None]:
    """The file of weights that --model.weights names, and the model.json beside it if it is of a run.

    Of a run or a checkpoint with an EMA they are those of the EMA, with which `accel-train predict` predicts, too.
    Raises UserError.
    """
    option = f"--model.weights: {path}"
    if not path.exists():
        raise UserError(f"{option}: no such file, run or checkpoint.")
    if path.is_dir() and (path / MANIFEST).exists():
        file = path / ("ema.safetensors" if (path / "ema.safetensors").exists() else "model.safetensors")
        try:
            verify_files(path, only=file.name)
        except (BrokenError, KeyError, OSError) as error:
            raise UserError(f"{option} is not a complete checkpoint ({error}).") from error
    elif path.is_dir():
        if not (path / FILE).exists():
            raise UserError(f"{option} is a folder, but neither a run (with {FILE}) nor a checkpoint. Name a file.")
        file = list(find_weights(path).values())[-1]
    else:
        file = path
        check_file(file)
    info = None
    if file.name in ("model.safetensors", "ema.safetensors"):
        folder = file.absolute().parent
        run = folder.parent.parent if folder.parent.name == "checkpoints" else folder
        info = read_model_info(run) if (run / FILE).exists() else None
    kind = " (EMA)" if file.name == "ema.safetensors" else ""
    return Weights(file, f"{file}{kind}", info.classes if info else None), info


def _has_checkpoint(config: Config) -> bool:
    """Whether this start continues from a checkpoint. Those of its own run are verified first."""
    if config.resume not in ("auto", "must"):
        return True
    try:
        return config.output_dir is not None and find_newest_checkpoint(config.output_dir) is not None
    except OSError as error:
        raise UserError(f"The checkpoints in {config.output_dir} cannot be read: {error}") from None


def _recorded(config: Config) -> Origin:
    """The origin in the model.json of the run that goes on; an empty one if there is none."""
    folders = [config.output_dir] if config.output_dir is not None else []
    if config.resume not in ("auto", "must"):
        folders += [Path(config.resume), Path(config.resume).absolute().parent.parent]
    for folder in folders:
        if (folder / FILE).is_file():
            return read_model_info(folder).origin
    return Origin()
