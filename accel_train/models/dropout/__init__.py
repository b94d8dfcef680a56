"""Dropout whose masks do not depend on the number of processes, nor on how a batch is divided.

keys = convert_dropout(model, seed)
keys.set_samples(ids, update)  # before each forward pass of training
logits = model(images)
"""

from accel_train.models.dropout.convert import KeyedFunctions, convert_dropout
from accel_train.models.dropout.keys import DropoutKeys

__all__ = ["DropoutKeys", "KeyedFunctions", "convert_dropout"]
