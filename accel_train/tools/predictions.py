"""The predictions file of an evaluation: the label and the logits of every sample of a split, each exactly once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from accel_train.errors import UserError, reason_of
from accel_train.files import atomic_replacement, open_to_write
from accel_train.untrusted import open_to_read


@dataclass(frozen=True)
class Predictions:
    """The rows are in the order of the ids, which are 0 … n - 1: a sample's number in its split.

    A .npz file has an array for each field (`about` as JSON text). Without files, there are no paths.
    """

    ids: npt.NDArray[np.int64]
    labels: npt.NDArray[Any]
    """int64 [n], or bool [n, classes] if an image may have several labels."""
    logits: npt.NDArray[np.float32]
    """[n, classes]"""
    paths: list[str] | None
    """Of the image files; None if the images are not in files of their own."""
    classes: tuple[str, ...]
    about: Mapping[str, Any]
    """Of what: "run", "weights" (the file) and its "sha256", "split", "data" and "time"."""

    def save(self, path: Path) -> None:
        """Write the file atomically. Raises OSError."""
        arrays: dict[str, Any] = {
            "ids": self.ids,
            "labels": self.labels,
            "logits": self.logits,
            "classes": np.array(self.classes),
            "about": np.array(json.dumps(dict(self.about))),
        }
        if self.paths is not None:
            arrays["paths"] = np.array(self.paths)
        with atomic_replacement(path) as temporary, open_to_write(temporary, "xb") as file:
            np.savez(file, **arrays)


def read_predictions(path: Path) -> Predictions:
    """Read a .npz file of `Predictions.save`. Raises UserError."""
    try:
        with open_to_read(path) as opened, np.load(opened, allow_pickle=False) as file:
            packed, unpacked = path.stat().st_size, sum(member.file_size for member in file.zip.infolist())
            if unpacked > packed:  # `save` does not compress; a small file of zeros could fill the memory
                raise ValueError(f"it is compressed: {packed:,} bytes for {unpacked:,}")
            paths = file["paths"].tolist() if "paths" in file else None
            classes, about = tuple(file["classes"].tolist()), json.loads(str(file["about"]))
            return _checked(Predictions(file["ids"], file["labels"], file["logits"], paths, classes, about))
    except Exception as error:  # the readers of a damaged file raise nearly anything: BadZipFile, zlib.error, …
        raise UserError(f"{path} is not a predictions file of `accel-train evaluate` ({reason_of(error)}).") from error


def _checked(found: Predictions) -> Predictions:
    """Raise ValueError if the arrays do not fit to each other."""
    count, classes = len(found.ids), len(found.classes)
    labels, logits = found.labels, found.logits
    known = labels.dtype == np.int64 and bool(((labels >= 0) & (labels < classes)).all())
    if not ((known and labels.shape == (count,)) or (labels.shape == (count, classes) and labels.dtype == np.bool_)):
        raise ValueError(f"labels are {labels.dtype} {list(labels.shape)}")
    if logits.shape != (count, classes) or logits.dtype != np.float32:
        raise ValueError(f"logits are {logits.dtype} {list(logits.shape)}")
    if not isinstance(found.about, dict) or (found.paths is not None and len(found.paths) != count):
        raise ValueError("about or paths do not fit")
    return found
