"""What a start begins from: its weights (published, a file's, another run's, its own checkpoint's) and its data."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from accelerate import Accelerator

from accel_train.checkpoint.choose import find_newest_checkpoint, find_weights
from accel_train.checkpoint.directory import MANIFEST, BrokenError, verify_files
from accel_train.config.compatibility import learning_fingerprint
from accel_train.config.schema import Config, Origin
from accel_train.data.sources.load import Splits, splits_of
from accel_train.errors import UserError
from accel_train.files import sha256
from accel_train.launch.agreement import broadcast_from_main, check_agreement, fail_together
from accel_train.models.weights import CONFIG, Weights, check_file, describe, is_hub_name, weights_file
from accel_train.optim.bitwise import what_bits_depend_on
from accel_train.optim.schedule import check_schedule
from accel_train.ownership.lease import Claim, Lease, claim_run
from accel_train.records.directory import begin_start
from accel_train.records.model_info import FILE, ModelInfo, read_model_info
from accel_train.records.provenance import code_facts
from accel_train.records.summary import check_best_metric
from accel_train.user_code.reference import parse_reference


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

    A run that has a checkpoint needs neither the file nor the hub: what has to be known of them is in its model.json.
    Raises UserError, also if the processes read different weights.
    """
    model = config.model
    if not (model.weights or model.pretrained or is_hub_name(model.name)):
        return StartPoint(config, resumes=broadcast_from_main(accelerator, lambda: _has_checkpoint(config)))
    resumes, origin, found = broadcast_from_main(accelerator, lambda: _on_main(config))
    config = dataclasses.replace(config, origin=origin)
    if found is None:
        return StartPoint(config, resumes=resumes)
    sha = origin.sha256
    if not accelerator.is_main_process:
        # Another node has its own cache of the hub, and perhaps another file of the same name.
        try:
            if model.weights is None and is_hub_name(model.name):
                found = dataclasses.replace(found, file=weights_file(model.name))
            sha = sha256(found.file)
        except UserError:
            sha = "not found"
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
    check_agreement(accelerator, **code_facts(config))  # before the user's own code runs

    def load() -> Splits:
        splits = splits_of(config)
        if config.data.order == "full":
            return splits
        from accel_train.data.loading import shard_table

        return dataclasses.replace(splits, table=shard_table(config.data, splits.train).digest(splits.table))

    # Only a user's Dataset may be loaded by all processes together; then they find its mistakes together.
    is_users = parse_reference("data.name", config.data.name) is not None
    if config.data.is_staged and not is_users:
        from accel_train.data.sources.staging import stage_on_all_nodes

        stage_on_all_nodes(config.data, accelerator, stopped)
    splits = load() if is_users else fail_together(accelerator, load)
    check_schedule(config.schedule, splits)
    check_best_metric(config, splits)
    drawn = {}
    if config.data.sampler != "shuffle":
        from accel_train.data.order.samplers import sample_weights, weights_digest

        weights = sample_weights(config, splits.train.labels, splits.train_weights, splits.unreadable)
        drawn = {"how often samples are drawn": weights_digest(weights)}
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


def _on_main(config: Config) -> tuple[bool, Origin, Weights | None]:
    """Whether the run resumes, its origin, and the weights that were found, if they are still there."""
    model, resumes = config.model, _has_checkpoint(config)
    is_finished = config.output_dir is not None and (config.output_dir / "result.json").is_file()
    recorded = _recorded(config) if resumes or is_finished else Origin()
    origin, weights = Origin(), None
    if is_hub_name(model.name):
        if recorded.model == model.name:
            origin = dataclasses.replace(recorded, weights="", sha256="")
        else:
            described = describe(model.name)
            origin = Origin(model=model.name, architecture=described.architecture)
            if model.pretrained or described.fixed_size:
                origin = dataclasses.replace(origin, image_size=described.image_size)
            if model.pretrained:
                origin = dataclasses.replace(origin, mean=described.mean, std=described.std)
                weights = Weights(weights_file(model.name), model.name, described.classes)
    if model.weights is not None:
        try:
            weights, info = find_file(model.weights)
        except UserError:
            if recorded.weights != str(model.weights):
                raise
            return resumes, recorded, None
        origin = dataclasses.replace(origin, weights=str(model.weights))
        if info is not None:
            origin = dataclasses.replace(origin, image_size=info.training_size, mean=info.mean, std=info.std)
    elif recorded.model == model.name:
        return resumes, recorded, None
    if weights is None:
        return resumes, origin, None
    try:
        return resumes, dataclasses.replace(origin, sha256=sha256(weights.file)), weights
    except OSError as error:
        raise UserError(f"--model.weights: {weights.file} cannot be read ({error.strerror}).") from error


def find_file(path: Path) -> tuple[Weights, ModelInfo | None]:
    """The file of weights that --model.weights names, and the model.json beside it if it is of a run.

    Of a run or a checkpoint with an EMA they are those of the EMA, with which `accel-train predict` predicts, too.
    Raises UserError.
    """
    option = f"--model.weights: {path}"
    if not path.exists():
        _, torchvisions, name = path.name.partition("_Weights.")
        advice = f" torchvision's: --model.name torchvision/NAME.{name} --model.pretrained true." * bool(torchvisions)
        raise UserError(f"{option}: no such file, run or checkpoint.{advice}")
    if path.is_dir() and (path / MANIFEST).exists():
        file = path / ("ema.safetensors" if (path / "ema.safetensors").exists() else "model.safetensors")
        try:
            verify_files(path, only=file.name)
        except (BrokenError, KeyError, OSError) as error:
            raise UserError(f"{option} is not a complete checkpoint ({error}).") from error
    elif path.is_dir():
        if not (path / FILE).exists():
            advice = (
                f" Give --model.name {shlex.quote(f'local-dir:{path}')} --model.pretrained true."
                * (path / CONFIG).exists()
            )
            raise UserError(f"{option} is a folder, but neither a run (with {FILE}) nor a checkpoint.{advice}")
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
    if config.resume not in ("auto", "must", "never"):
        return True
    try:
        return config.output_dir is not None and find_newest_checkpoint(config.output_dir) is not None
    except OSError as error:
        raise UserError(f"The checkpoints in {config.output_dir} cannot be read: {error}") from None


def _recorded(config: Config) -> Origin:
    """The origin in the model.json of the run that goes on; an empty one if there is none."""
    folders = [config.output_dir] if config.output_dir is not None else []
    if config.resume not in ("auto", "must", "never"):
        folders += [Path(config.resume), Path(config.resume).absolute().parent.parent]
    for folder in folders:
        if (folder / FILE).is_file():
            return read_model_info(folder).origin
    return Origin()
