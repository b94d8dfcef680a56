"""The options of the model: the group `model`. training.py says how an option is declared."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from accel_train.config.declaration import (
    FRACTION,
    JSON_OBJECT,
    MODEL_NAME,
    POSITIVE,
    STARTS_IN_EPOCH,
    Free,
)


@dataclass(frozen=True)
class Model:
    name: Annotated[str, MODEL_NAME] = "mnist_cnn"
    """A timm model, torchvision/NAME, your own FILE.py:FUNCTION, or ours: digits_cnn, mnist_cnn, alexnet_bn, …;
    or, as timm saves models, hf-hub:ORG/NAME or local-dir:DIR. Published weights other than the default are named after
    a dot: resnet50.a1_in1k, torchvision/resnet50.IMAGENET1K_V1."""
    kwargs: Annotated[str | None, JSON_OBJECT] = None
    """More arguments of the model, as JSON: '{"depth": 3}'. In a recipe also as a mapping."""
    pretrained: bool = False
    """Start from published weights. The last layer is new if the number of classes differs."""
    weights: Path | None = None
    """Start from the weights in this file (.safetensors, .pth), run or checkpoint."""
    image_size: Annotated[int | None, POSITIVE] = None
    """Input height and width in pixels; default: that of the weights, the data's, or 224."""
    eval_image_size: Annotated[int | None, POSITIVE] = None
    """Height and width in evaluation and prediction, if others; see augment.resize. Default: as in training."""
    freeze_body: bool = False
    """Train only the last layer; BatchNorm statistics of the other layers do not change."""
    freeze: tuple[str, ...] = ()
    """Layers not to train, by their names, such as conv1 layer1."""
    freeze_epochs: Annotated[int | None, POSITIVE, STARTS_IN_EPOCH] = None
    """Train what is frozen, too, after this many epochs; default: never."""
    dropout: Annotated[float | None, FRACTION] = None
    """Dropout rate before the classifier, if the model has dropout; default: the model's."""
    drop_path: Annotated[float | None, FRACTION] = None
    """Stochastic depth rate, if the model has it; default: the model's."""
    gradient_checkpointing: Annotated[
        bool,
        Free("how gradients are computed, not their values"),
    ] = False
    """Recompute activations in the backward pass: less memory, more time."""
    sync_batchnorm: bool = False
    """Compute BatchNorm statistics over the micro-batches of all processes (on GPUs), not over virtual batches."""
