"""Objects of a Python program where options name code: `train(model=net)`.

A Config is text. It calls such an object "<object>:NAME#FINGERPRINT": whatever compares two configurations also finds
that another object was given. An object that has an importable name is called by that instead: it is like a user's code
in a module.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_train.errors import UserError
from accel_train.user_code.reference import GIVEN, OBJECT, PREFIXES, Reference, code_file, missing

GROUPS = {option.partition(".")[0]: option for option in PREFIXES if option.endswith(".name")}
"""A group of options -> the option in it that may name code: train(model=net) is train(model={"name": net})."""


def take_objects(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (the settings with the names of the objects in their place, option -> object).

    `settings` are nested as in a recipe. A group may be given as its name alone: {"model": net}. None sets nothing.
    Metrics are given as {"metrics": {name: function}}; their options are "metrics:NAME".
    """
    plain: dict[str, Any] = {}
    objects: dict[str, Any] = {}
    for key, value in settings.items():
        option = GROUPS.get(key)
        if key == "metrics" and value is None:
            continue
        if key == "metrics" and isinstance(value, Mapping):
            if not all(isinstance(name, str) and name.strip() for name in value):
                raise UserError("metrics: expected {name: function}, with a name for each that is not empty.")
            plain[key] = list(value)
            objects |= {f"metrics:{name}": metric for name, metric in value.items()}
            continue
        if option is None:
            plain[key] = value
            continue
        is_object = not isinstance(value, Mapping) or (option == "data.name" and _is_datasets(value))
        group = {"name": value} if is_object else dict(value)
        if "name" in group and group["name"] is None:
            del group["name"]
        named = group.get("name", "")
        if not isinstance(named, str):
            group["name"] = importable_name(named)
            if not group["name"]:
                group["name"], objects[option] = name_of(option, named), named
        if group:
            plain[key] = group
    return plain, objects


PLAIN = (str, int, float, list, tuple, Path, type(None))


def _is_datasets(value: Mapping[Any, Any]) -> bool:
    """Whether it maps splits to Datasets, rather than options to values."""
    return "train" in value or any(key != "name" and not isinstance(item, PLAIN) for key, item in value.items())


def importable_name(value: Any) -> str:
    """Return "module:NAME" of a function or class that any process can import; "" of other objects."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if not isinstance(module, str) or module == "__main__" or not (isinstance(name, str) and name.isidentifier()):
        return ""
    same = getattr(sys.modules.get(module), name, None) is value
    reference = Reference("", module, name)
    return str(reference) if same and code_file(reference) is not None else ""


def name_of(option: str, value: Any) -> str:
    """Return "<object>:NAME#FINGERPRINT". The fingerprint is of what a run that goes on needs to be the same."""
    function = getattr(value, "func", value)  # of a functools.partial
    name = str(getattr(function, "__name__", type(value).__name__)).strip("<>")
    seen: dict[str, Any] = {}
    if option == "data.name" and isinstance(value, Mapping):
        name = type(next(iter(value.values()), None)).__name__
        seen = {
            str(split): [len(dataset), _labels(dataset)] for split, dataset in value.items() if _has_length(dataset)
        }
    elif _is_module(value):
        seen = {key: list(getattr(tensor, "shape", ())) for key, tensor in value.state_dict().items()}
    digest = "" if not seen else "#" + hashlib.sha256(json.dumps(seen).encode()).hexdigest()[:8]
    return f"{OBJECT}:{name}{digest}"


def _is_module(value: Any) -> bool:
    return hasattr(value, "state_dict") and not isinstance(value, type)


def _has_length(dataset: Any) -> bool:
    try:
        return len(dataset) >= 0
    except TypeError:  # an error where it is used
        return False


def _labels(dataset: Any) -> str:
    """The SHA-256 of the labels, "" if they cannot be known without reading all items."""
    try:
        labels = known_labels(dataset)
    except (TypeError, ValueError):  # an error where they are used
        return ""
    return "" if labels is None or labels.dtype == object else hashlib.sha256(labels.tobytes()).hexdigest()


def known_labels(dataset: Any) -> Any:
    """Return a Dataset's `targets`, or the whole numbers in the second tensor of a TensorDataset, as an array of NumPy;
    None if it has neither. A Subset has those of its items. Raises TypeError and ValueError."""
    import numpy as np

    labels = getattr(dataset, "targets", None)
    tensors: Sequence[Any] = getattr(dataset, "tensors", ())
    if labels is None and len(tensors) == 2 and not tensors[1].dtype.is_floating_point and tensors[1].ndim == 1:
        labels = tensors[1]
    if labels is None and hasattr(dataset, "dataset") and hasattr(dataset, "indices"):
        inner = known_labels(dataset.dataset)
        return None if inner is None else inner[np.asarray(dataset.indices, dtype=np.int64)]
    return None if labels is None else np.asarray(labels)


@contextlib.contextmanager
def provided(objects: Mapping[str, Any]) -> Iterator[None]:
    """Within it, the names of these objects (option -> object) mean them."""
    before = dict(GIVEN)
    try:
        GIVEN.update({option: (name_of(option, value), value) for option, value in objects.items()})
        yield
    finally:
        GIVEN.clear()
        GIVEN.update(before)


def load_object(option: str, reference: Reference) -> Callable[..., Any]:
    """Return the object that was given for the option, as something to call. Raises UserError if there is none."""
    name, value = GIVEN.get(option, ("", None))
    if name != str(reference):
        raise UserError(missing(option, reference))
    if option == "model.name" and _is_module(value):
        # A copy: the same call of train begins with the same weights, however often it is made.
        return lambda: copy.deepcopy(value)
    if option == "data.name" and not callable(value):
        return lambda: value
    if not callable(value):
        raise UserError(f"--{option}: found an object of type {type(value).__name__}; expected a function or a class.")
    return value  # type: ignore[no-any-return]


def weights_hash() -> str:
    """Return the SHA-256 of the weights of the model that was given; "" if none was, or a function that makes one."""
    _, model = GIVEN.get("model.name", ("", None))
    if not _is_module(model):
        return ""
    import torch

    found = hashlib.sha256()
    for tensor in model.state_dict().values():
        if isinstance(tensor, torch.Tensor):
            found.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
