"""Models by name: timm's, torchvision's and the small nets of the tutorials."""

from accel_train.models.classifier import classifier_names, required_classifier, set_train_mode
from accel_train.models.factory import create_model, input_size, pretrained_normalization
from accel_train.models.wrapping import input_names, prepare_recomputation

__all__ = [
    "classifier_names",
    "create_model",
    "input_names",
    "input_size",
    "prepare_recomputation",
    "pretrained_normalization",
    "required_classifier",
    "set_train_mode",
]
