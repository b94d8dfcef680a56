"""Creates everything that training needs from a recipe: model, optimizer, schedule, EMA, loss and input pipelines.

train.py trains with them, and bench measures them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from accel_train import models
from accel_train.checkpoint.own_optimizer import with_own_optimizer
from accel_train.config.schema import Config
from accel_train.data.loading import InputPipeline, create_input
from accel_train.data.order import Plan, TrainingSampler, create_plan, divide_batch
from accel_train.data.sources.load import Splits
from accel_train.errors import UserError, counted
from accel_train.launch.accelerator import collective_seconds, create_accelerator, start_seconds
from accel_train.launch.environment import Launch
from accel_train.models.batchnorm import VirtualBatches, has_batchnorm
from accel_train.models.dropout import convert_dropout
from accel_train.models.factory import create_new_model, is_timms
from accel_train.models.nets import TORCHVISION
from accel_train.models.trial import find_verdict
from accel_train.models.verdict import Verdict
from accel_train.models.weights import Weights
from accel_train.models.wrapping import shard_batchnorm, unwrap_model
from accel_train.optim.bitwise import use_deterministic_kernels, use_deterministic_layers
from accel_train.optim.loss import create_checked_loss
from accel_train.optim.optimizer import create_optimizer, needs_timm
from accel_train.optim.performance import (
    prepare_compilation,
    rebuild_ddp_buckets,
    set_defaults,
    unwrap_optimizer,
    use_fastest_memory_format,
)
from accel_train.optim.schedule import LearningRate, own_factors
from accel_train.step import Step

if TYPE_CHECKING:
    from accel_train.optim.ema import Ema
    from accel_train.records.metrics import OwnMetrics


@dataclass(frozen=True)
class TrainingSetup:
    """All objects of a recipe, on this process's device. All processes create it together."""

    config: Config
    launch: Launch
    accelerator: Accelerator
    splits: Splits
    plan: Plan
    sampler: TrainingSampler
    image_size: int  # height and width of the model's input in training, in pixels
    memory_format: torch.memory_format  # of the model's input
    model: nn.Module  # as Accelerate prepared it
    bare_model: nn.Module  # the same model without DDP and torch.compile around it
    optimizer: Any  # on which to call `step` and `zero_grad`
    schedule: LearningRate
    ema: Ema | None
    step: Step  # takes an update
    verdict: Verdict  # of the model's trial
    criterion: Callable[[Tensor, Tensor], Tensor]  # the loss of each sample, see `create_loss`
    evaluation_batch: int  # samples of a process in one forward pass of evaluation, unless its split is small
    training: InputPipeline
    evaluations: dict[str, InputPipeline]
    """For "val" and "test", if the data has them."""
    own_metrics: OwnMetrics | None = field(default=None, kw_only=True)  # those of --metrics
    warnings: tuple[str, ...]  # for the user
    loaded: str  # which weights were loaded into the new model; "" if none
    from_checkpoint: bool
    """The run began from weights that this start has not loaded, because a checkpoint has newer ones."""

    @property
    def device(self) -> torch.device:
        device: torch.device = self.accelerator.device
        return device


Preflight = Callable[[Config, Launch, Accelerator], Callable[[TrainingSetup], None]]
"""Checks the processes of a new run, which are connected, and returns what checks the rest before it trains."""


def connect(config: Config, launch: Launch) -> Accelerator:
    """Connect to the other processes; return the Accelerator. Raises UserError if the batch cannot be divided, with any
    model, a tracker is not known or the processes do not connect."""
    if config.trackers:
        from accel_train.records.trackers import check_trackers

        check_trackers(config.trackers)
    divide_batch(config, launch.world_size, batchnorm=False)
    accelerator = create_accelerator(
        launch,
        rendezvous_seconds=config.rendezvous_timeout_seconds,
        collective_seconds=collective_seconds(start_seconds(config.hang_timeout_seconds)),
        share_gpus=config.share_gpus,
    )
    set_defaults(accelerator.device)
    use_deterministic_kernels(config, accelerator)
    return accelerator


def import_libraries(config: Config) -> None:
    """Import timm and torchvision if settings need them. A run that needs neither saves a second or two.

    Call it before data are read, so that a missing library is an error then. Raises UserError.
    """
    needs = (
        ("timm", "model.name", is_timms(config.model.name)),
        ("torchvision", "model.name", config.model.name.startswith(TORCHVISION)),
        ("timm", "optim", needs_timm(config.optim)),
        ("torchvision", "augment.policy", config.augment.policy != "none"),
    )
    for library, option, is_needed in needs:
        try:
            if is_needed:
                importlib.import_module(library)
        except ImportError as error:
            raise UserError(
                f"{option}: this setting needs {library}, which cannot be imported ({error}); pip install {library}"
            ) from error


def create_training_setup(
    config: Config,
    launch: Launch,
    accelerator: Accelerator,
    splits: Splits,
    *,
    weights: Weights | None = None,
    pretrained: bool = True,
) -> TrainingSetup:
    """Create everything that `config` names, with the `weights` to begin from. `pretrained=False`: without pretrained
    ones, for a benchmark or a checkpoint's weights. Collective. Raises UserError if something does not fit."""
    size = models.input_size(config.model, splits.image_size, config.origin)
    model, loaded = create_new_model(
        config, accelerator, splits.classes, splits.channels, size, weights, pretrained=pretrained
    )
    memory_format = use_fastest_memory_format(accelerator, model)
    use_deterministic_layers(config, model, splits.channels, size)  # before the EMA, which has the same layers
    verdict = find_verdict(config, accelerator, model, splits.channels, size, resumes=not pretrained)
    verdict.prepare_ddp(accelerator)
    virtual_batch, accumulation = divide_batch(
        config, launch.world_size, batchnorm=has_batchnorm(model), apart=bool(verdict.together)
    )
    plan = create_plan(config, len(splits.train), launch.world_size, accumulation, virtual_batch)

    # EMA and optimizer come after the move to the device, because they keep tensors, and before the wrapping, which
    # changes names. FSDP2 replaces BatchNorm's parameters: shard those before the optimizer is created.
    ema = None
    if config.ema.enabled:
        from accel_train.optim.ema import create_ema

        ema = create_ema(config.ema, model, plan.updates_per_epoch, config.batch_size, config.epochs)
    virtual_batches = VirtualBatches(model, virtual_batch, plan.virtual_batches if config.bitwise else None)
    dropout = None if verdict.together else convert_dropout(model, config.seed)
    shard_batchnorm(accelerator, model)
    optimizer = create_optimizer(config.optim, model, sharded=accelerator.is_fsdp2)
    # The schedule is not prepared: it depends on the update's number, which Accelerate counts differently.
    model, optimizer = accelerator.prepare(model, optimizer)
    bare_model = unwrap_model(model)
    optimizer = with_own_optimizer(config.optim, accelerator, bare_model, optimizer)
    length = {"updates": plan.updates, "updates_per_epoch": plan.updates_per_epoch}
    factors = own_factors(config.schedule, accelerator, **length)
    schedule = LearningRate(config.schedule, optimizer.optimizer, **length, factors=factors)
    step = Step(
        config,
        accelerator,
        plan,
        model,
        bare_model,
        unwrap_optimizer(optimizer),
        ema=ema,
        verdict=verdict,
        virtual_batches=virtual_batches,
        dropout=dropout,
    )
    device, mixes = accelerator.device, config.augment.mixes
    criterion = create_checked_loss(config.loss, splits.train.labels, len(splits.classes), device, mixes=mixes)
    setup = TrainingSetup(
        config=config,
        launch=launch,
        accelerator=accelerator,
        splits=splits,
        image_size=size,
        memory_format=memory_format,
        model=model,
        bare_model=bare_model,
        optimizer=step.optimizer,
        schedule=schedule,
        ema=ema,
        step=step,
        verdict=verdict,
        criterion=criterion,
        warnings=(*_warnings(config, verdict, plan), *plan.warnings()),
        loaded=loaded,
        from_checkpoint=not pretrained and (config.model.pretrained or config.model.weights is not None),
        **create_input(config, accelerator, splits, size, memory_format, plan),
    )
    # Bitwise, all micro-batches are summed by ExactGradients, and Accelerate divides by nothing.
    accelerator.gradient_accumulation_steps = 1 if config.bitwise else plan.accumulation
    prepare_compilation(accelerator, config.model)
    if step.ddp_sums:
        images = torch.zeros(plan.micro_batch, splits.channels, size, size, device=device)
        rebuild_ddp_buckets(accelerator, model, images.to(memory_format=memory_format))
    return setup


def _warnings(config: Config, verdict: Verdict, plan: Plan) -> list[str]:
    """What the model's trial has found, for the user. With --bitwise each pass has one virtual batch in any case."""
    found = list(verdict.obstacles())
    if verdict.together and not config.bitwise:
        found.insert(
            0,
            f"model: one pass over two virtual batches is not two passes over one each: {verdict.together}. So each "
            f"forward pass has one virtual batch of {plan.virtual_batch} images, the same on any number of processes: "
            f"{counted(plan.accumulation, 'pass')} an update, which may be slower.",
        )
    return found
