"""The options of the model: the group `model`. training.py says how an option is declared."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from accel_train.config.declaration import (
    FRACTION,
    JSON_OBJECT,
    MILESTONES,
    MODEL_NAME,
    NOT_NEGATIVE,
    POSITIVE,
    SIZES,
    STARTS_IN_EPOCH,
    Free,
    Synonyms,
)


@dataclass(frozen=True)
class Model:
    name: Annotated[str, MODEL_NAME, Synonyms("model arch architecture backbone net network model-name model-type")] = (
        "mnist_cnn"
    )
    """A timm model, torchvision/NAME, your own FILE.py:FUNCTION, or ours: digits_cnn, mnist_cnn, alexnet_bn, …;
    or, as timm saves models, hf-hub:ORG/NAME or local-dir:DIR. Published weights other than the default are named after
    a dot: resnet50.a1_in1k, torchvision/resnet50.IMAGENET1K_V1."""
    kwargs: Annotated[str | None, JSON_OBJECT, Synonyms("model-kwargs")] = None
    """More arguments of the model, as JSON: '{"depth": 3}'. In a recipe also as a mapping."""
    pretrained: Annotated[
        bool, Synonyms("weights use-pretrained pretrained-weights finetune fine-tune imagenet-pretrained")
    ] = False
    """Start from published weights. The last layer is new if the number of classes differs."""
    weights: Path | None = None
    """Start from the weights in this file (.safetensors, .pth), run or checkpoint."""
    remap_classes: Annotated[bool, Synonyms("cls-remap")] = False
    """If model.weights is of other classes, take the rows of the last layer for those that both have, by name; the
    other rows are new. Default: then the whole last layer is new."""
    image_size: Annotated[
        int | None, POSITIVE, Synonyms("img-size imgsz image-size input-size size resolution imsize train-crop-size")
    ] = None
    """Input height and width in pixels; default: that of the weights, the data's, or 224."""
    eval_image_size: Annotated[
        int | None, POSITIVE, Synonyms("val-crop-size test-input-size val-image-size eval-crop-size")
    ] = None
    """Height and width in evaluation and prediction, if others; see augment.resize. Default: as in training."""
    progressive_sizes: Annotated[tuple[int, ...], SIZES, Synonyms("progressive-resizing min-res")] = ()
    """Smaller heights and widths in training at first, such as 128 160; see model.progressive-epochs. augment.resize
    becomes smaller in proportion; augment.pad does not. Evaluation does not change."""
    progressive_epochs: Annotated[tuple[int, ...], MILESTONES, Synonyms("end-ramp")] = ()
    """The epochs after which each of model.progressive-sizes ends; then the next one begins, or model.image-size."""
    freeze_body: Annotated[bool, Synonyms("freeze-backbone linear-probe freeze-encoder")] = False
    """Train only the last layer; BatchNorm statistics of the other layers do not change."""
    freeze: Annotated[tuple[str, ...], Synonyms("freeze-layers frozen-layers")] = ()
    """Layers not to train, by names such as conv1 layer1; or how many layers, from the input: 3."""
    freeze_epochs: Annotated[int | None, POSITIVE, STARTS_IN_EPOCH, Synonyms("unfreeze-epoch unfreeze-after")] = None
    """Train what is frozen, too, after this many epochs; default: never."""
    gradual_unfreezing: bool = False
    """After model.freeze-epochs, let one layer more be trained in each epoch, from the last to the first."""
    dropout: Annotated[float | None, FRACTION, Synonyms("drop drop-rate dropout-rate")] = None
    """Dropout rate before the classifier, if the model has dropout; default: the model's."""
    drop_path: Annotated[
        float | None, FRACTION, Synonyms("drop-path-rate drop-connect stochastic-depth stochastic-depth-prob")
    ] = None
    """Stochastic depth rate, if the model has it; default: the model's."""
    head_init_scale: Annotated[float | None, NOT_NEGATIVE] = None
    """Multiply the weights that the last layer begins with; 0: all classes are equally likely at first."""
    head_init_bias: float | None = None
    """The bias that the last layer begins with, such as -6 for bce with many classes."""
    gradient_checkpointing: Annotated[
        bool,
        Free("how gradients are computed, not their values"),
        Synonyms("grad-checkpointing activation-checkpointing"),
    ] = False
    """Recompute activations in the backward pass: less memory, more time."""
    sync_batchnorm: Annotated[bool, Synonyms("sync-bn syncbn sync-batch-norm")] = False
    """Compute BatchNorm statistics over the micro-batches of all processes (on GPUs), not over virtual batches."""
