"""Models by name: timm's, torchvision's and the small nets of the tutorials."""

from accel_train.models.factory import create_model, input_size, pretrained_normalization
from accel_train.models.freezing import classifier_names, freeze_body, input_names, set_train_mode
from accel_train.models.recomputation import prepare_recomputation, preserve_buffers

__all__ = [
    "classifier_names",
    "create_model",
    "freeze_body",
    "input_names",
    "input_size",
    "prepare_recomputation",
    "preserve_buffers",
    "pretrained_normalization",
    "set_train_mode",
]
