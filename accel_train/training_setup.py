"""Creates everything that training needs from a recipe: model, optimizer, schedule, EMA, loss and input pipelines.

train.py trains with them, and bench measures them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from timm.scheduler.scheduler import Scheduler
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from accel_train import models
from accel_train.config.schema import Config
from accel_train.data.loading import InputPipeline, create_input_pipeline
from accel_train.data.order.plan import Plan, accumulation_steps, virtual_batch_size
from accel_train.data.order.samplers import EvaluationSampler, TrainingSampler
from accel_train.data.sources.load import Splits
from accel_train.errors import UserError
from accel_train.evaluate import Batch, evaluation_batch_size
from accel_train.exact_sum import ExactGradients
from accel_train.launch.accelerator import create_accelerator
from accel_train.launch.consensus import broadcast_from_main
from accel_train.launch.environment import Launch
from accel_train.launch.rendezvous import collective_seconds
from accel_train.models.batchnorm import VirtualBatches, has_batchnorm
from accel_train.models.dropout import DropoutKeys, KeyedFunctions, convert_dropout
from accel_train.models.independence import Independence, check_independence
from accel_train.models.weights.files import Weights
from accel_train.models.weights.new_model import create_new_model
from accel_train.models.wrapping import shard_batchnorm, unwrap_model
from accel_train.optim.bitwise import use_deterministic_kernels
from accel_train.optim.clipping import parameters_to_clip
from accel_train.optim.ema import create_ema
from accel_train.optim.loss import create_checked_loss
from accel_train.optim.optimizer import create_optimizer
from accel_train.optim.performance import (
    check_compilation,
    rebuild_ddp_buckets,
    set_defaults,
    unwrap_optimizer,
    use_fastest_memory_format,
)
from accel_train.optim.schedule import create_schedule
from accel_train.user_code.reference import parse_reference


@dataclass(frozen=True)
class TrainingSetup:
    """All objects of a recipe, on this process's device. All processes create it together."""

    config: Config
    launch: Launch
    accelerator: Accelerator
    splits: Splits
    plan: Plan
    sampler: TrainingSampler
    image_size: int
    """Height and width of the model's input, in pixels."""
    memory_format: torch.memory_format
    """Of the model's input."""
    model: nn.Module
    """As Accelerate prepared it."""
    bare_model: nn.Module
    """The same model without DDP and torch.compile around it."""
    optimizer: Any
    """The object on which to call `step` and `zero_grad`."""
    schedule: Scheduler
    ema: ModelEmaV3 | None
    virtual_batches: VirtualBatches
    """The model's BatchNorms."""
    dropout: DropoutKeys
    """Of the model's dropout layers."""
    around_forward: AbstractContextManager[Any]
    """To be entered for each forward pass of training: for models that call dropout as a function."""
    exact_gradients: ExactGradients | None
    """Sums the gradients of all virtual batches without order; None unless --bitwise."""
    criterion: Callable[[Tensor, Tensor], Tensor]
    """The loss of each sample, see `create_loss`."""
    clipped: list[nn.Parameter]
    """The parameters whose gradients are clipped."""
    recomputed_buffers: list[Tensor]
    """For `models.preserve_buffers`."""
    training: InputPipeline
    evaluations: dict[str, InputPipeline]
    """For "val" and "test", if the data has them."""
    warnings: tuple[str, ...]
    """Warnings for the user."""
    loaded: str
    """Which weights were loaded into the new model; "" if none."""
    from_checkpoint: bool
    """The run began from weights that this start has not loaded, because a checkpoint has newer ones."""

    @property
    def device(self) -> torch.device:
        device: torch.device = self.accelerator.device
        return device

    def forward(self, batch: Batch, update: int, *, padded: bool) -> tuple[Tensor, Tensor]:
        """The logits, float [b, classes], and targets of a micro-batch of training.

        First it tells the model's layers which samples these are: dropout draws by sample, and BatchNorm does not count
        padding. `padded`: whether the update has any, on any process.
        """
        inputs, targets = self.training.transform(batch)
        self.dropout.set_samples(batch["ids"], update)
        self.virtual_batches.begin(batch["weights"], padded=padded)
        with self.around_forward:
            return self.model(inputs), targets


def connect(config: Config, launch: Launch) -> Accelerator:
    """Connect to the other processes and create the Accelerator.

    Raises UserError if the batch cannot be divided, with any model, or the processes do not connect.
    """
    divide_batch(config, launch, batchnorm=False)
    accelerator = create_accelerator(
        launch,
        log_with=config.trackers,
        project_dir=config.output_dir or Path("runs"),
        rendezvous_seconds=config.rendezvous_timeout_seconds,
        collective_seconds=collective_seconds(config.start_timeout_seconds),
        share_gpus=config.share_gpus,
    )
    set_defaults(accelerator.device)
    use_deterministic_kernels(config, accelerator)
    return accelerator


def create_training_setup(
    config: Config,
    launch: Launch,
    accelerator: Accelerator,
    splits: Splits,
    *,
    weights: Weights | None = None,
    published: bool = True,
) -> TrainingSetup:
    """Create everything that `config` names, with the `weights` to begin from. `published=False`: without pretrained
    ones, for a benchmark or a checkpoint's weights. Collective. Raises UserError if settings do not fit each other, the
    data or the device.
    """
    device = accelerator.device
    size = models.input_size(config.model, splits.image_size, config.origin)
    model, warnings, loaded = create_new_model(
        config, accelerator, splits.classes, splits.channels, size, weights, published=published
    )
    virtual_batch, accumulation = divide_batch(config, launch, batchnorm=has_batchnorm(model))
    # Bitwise, all micro-batches are summed by ExactGradients, and Accelerate divides by nothing.
    accelerator.gradient_accumulation_steps = 1 if config.bitwise else accumulation
    check_compilation(accelerator)
    samples = len(splits.train)
    plan = Plan(samples, config.batch_size, launch.world_size, accumulation, config.data.drop_last, virtual_batch)
    sampler = TrainingSampler(plan, config.seed, splits.unreadable)

    # Create EMA and optimizer after the move to the device, because they keep tensors, and before the wrapping, which
    # changes names. FSDP2 replaces BatchNorm's parameters, so shard those before creating the optimizer.
    memory_format = use_fastest_memory_format(accelerator, model)
    ema = create_ema(config.ema, model)
    virtual_batches, dropout, independence = _make_independent(
        config, accelerator, model, splits.channels, size, virtual_batch
    )
    shard_batchnorm(accelerator, model)
    optimizer = create_optimizer(config.optim, model, sharded=accelerator.is_fsdp2)
    schedule = create_schedule(
        config.schedule, optimizer, epochs=config.epochs, updates_per_epoch=plan.updates_per_epoch
    )
    # The schedule is not prepared: it depends on the update's number, which Accelerate counts differently.
    model, optimizer = accelerator.prepare(model, optimizer)
    bare_model = unwrap_model(model)
    trained = [parameter for parameter in bare_model.parameters() if parameter.requires_grad]
    clipped = parameters_to_clip(config.optim, bare_model)  # FSDP2 has replaced the parameters
    recomputed_buffers = models.prepare_recomputation(model, config.model)
    shape = plan.micro_batch, splits.channels, size, size
    rebuild_ddp_buckets(accelerator, model, torch.zeros(shape, device=device).to(memory_format=memory_format))
    criterion = create_checked_loss(config.loss, splits.train.labels, len(splits.classes), device, mixes=_mixes(config))
    training, evaluations = _create_pipelines(config, accelerator, splits, plan, sampler, size, memory_format)
    return TrainingSetup(
        config=config,
        launch=launch,
        accelerator=accelerator,
        splits=splits,
        plan=plan,
        sampler=sampler,
        image_size=size,
        memory_format=memory_format,
        model=model,
        bare_model=bare_model,
        optimizer=unwrap_optimizer(optimizer),
        schedule=schedule,
        ema=ema,
        virtual_batches=virtual_batches,
        dropout=dropout,
        exact_gradients=ExactGradients(trained, plan.virtual_batches) if config.bitwise else None,
        criterion=criterion,
        clipped=clipped,
        recomputed_buffers=recomputed_buffers,
        training=training,
        evaluations=evaluations,
        around_forward=KeyedFunctions(dropout) if independence.needs_functions else nullcontext(),
        warnings=(*warnings, *independence.warnings),
        loaded=loaded,
        from_checkpoint=not published and (config.model.pretrained or config.model.weights is not None),
    )


def _create_pipelines(
    config: Config,
    accelerator: Accelerator,
    splits: Splits,
    plan: Plan,
    sampler: TrainingSampler,
    size: int,
    memory_format: torch.memory_format,
) -> tuple[InputPipeline, dict[str, InputPipeline]]:
    """The input of the training, and those of the evaluations by split."""

    def pipeline(source: Any, sampler: Any, *, training: bool) -> InputPipeline:
        return create_input_pipeline(
            config, splits, source, sampler, accelerator, training=training, size=size, memory_format=memory_format
        )

    evaluation_batch = evaluation_batch_size(config, plan.processes, plan.micro_batch)
    held_out = {"val": splits.validation, "test": splits.test}
    evaluations = {
        split: pipeline(source, EvaluationSampler(len(source), evaluation_batch), training=False)
        for split, source in held_out.items()
        if source is not None
    }
    return pipeline(splits.train, sampler, training=True), evaluations


def _make_independent(
    config: Config, accelerator: Accelerator, model: nn.Module, channels: int, size: int, virtual_batch: int
) -> tuple[VirtualBatches, DropoutKeys, Independence]:
    """Convert the layers of `model` that mix samples or draw random numbers, in place, so that what it computes for a
    sample does not depend on the number of processes; and check that nothing else does. Raises UserError if --bitwise
    is not possible."""
    in_update = config.batch_size // virtual_batch if config.bitwise else None
    virtual_batches = VirtualBatches(model, virtual_batch, in_update)
    dropout = convert_dropout(model, config.seed)
    tried = check_independence(
        model,
        channels,
        size,
        next(model.parameters()).device,
        dropout,
        batch_norms=virtual_batches.modules,
        recomputes=config.model.gradient_checkpointing,
    )
    # All processes must do the same, even if the trial rounded otherwise on another kind of device.
    independence = broadcast_from_main(accelerator, lambda: tried)
    if config.bitwise and independence.warnings:
        raise UserError(f"--bitwise: {independence.warnings[0]}")
    return virtual_batches, dropout, independence


def _mixes(config: Config) -> bool:
    return config.augment.mixup > 0 or config.augment.cutmix > 0


def divide_batch(config: Config, launch: Launch, *, batchnorm: bool) -> tuple[int, int]:
    """How an update's batch is divided: (samples of a virtual batch, micro-batches of each process).

    `batchnorm`: whether the model has BatchNorms that count over virtual batches. If nothing depends on virtual
    batches, they are single samples, or the pairs that are mixed. Raises UserError if the batch cannot be divided.
    """
    mixes = _mixes(config)
    unit, why = (2, "in pairs, as mixup and cutmix need") if mixes else (1, "")
    size = config.virtual_batch_size
    if size is None and (batchnorm or config.bitwise):
        size = virtual_batch_size(config.batch_size, batchnorm=batchnorm, pairs=mixes)
    if size is not None:
        unit, why = size, f"in virtual batches of {size}" + ", over which BatchNorm counts" * batchnorm
    # Bitwise, each forward pass has one virtual batch: another shape could choose another kernel.
    limit = unit if config.bitwise and (config.micro_batch_size or unit) >= unit else config.micro_batch_size
    return unit, accumulation_steps(
        config.batch_size, launch.world_size, limit, unit=unit, why=why, virtual=size is not None
    )


def divide_without_data(config: Config, launch: Launch, accelerator: Accelerator) -> tuple[int, int]:
    """The same as `divide_batch`, for --config-only: the model is made without memory and arithmetic."""
    size = models.input_size(config.model, None, config.origin)
    # A user's own code may need real numbers.
    with torch.device("cpu" if parse_reference("model.name", config.model.name) else "meta"):
        model = models.create_model(
            config.model, num_classes=2, channels=3, image_size=size, published=False, origin=config.origin
        )
    synchronized = config.model.sync_batchnorm and accelerator.device.type == "cuda"
    return divide_batch(config, launch, batchnorm=has_batchnorm(model) and not synchronized)
