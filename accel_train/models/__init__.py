"""Models by name: timm's, torchvision's and the small nets of the tutorials."""

from torch import nn

from accel_train.config.schema import Model
from accel_train.models.classifier import classifier_names, required_classifier
from accel_train.models.factory import create_model, input_size, pretrained_normalization
from accel_train.models.wrapping import input_names, prepare_recomputation, preserve_buffers

__all__ = [
    "classifier_names",
    "create_model",
    "input_names",
    "input_size",
    "prepare_recomputation",
    "preserve_buffers",
    "pretrained_normalization",
    "required_classifier",
    "set_train_mode",
]


def set_train_mode(model: nn.Module, settings: Model, epoch: int = 0) -> None:
    """`model.train()`, but what is frozen in `epoch`, counted from 0, stay as they are. `model` may be wrapped."""
    model.train()
    if settings.freeze or settings.freeze_body:
        from accel_train.models.freezing import keep_frozen

        keep_frozen(model, settings, epoch)
