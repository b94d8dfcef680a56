"""Files of weights, which may come from anywhere: they are read without running any code that may be in them."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import timm
import torch
from torch import Tensor

from accel_train.errors import UserError, one_line, reason_of
from accel_train.untrusted import open_regular_file

SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".tar", ".ckpt")

TAR_MAGIC = slice(257, 262)


def read_state(file: Path) -> dict[str, Tensor]:
    """The tensors in a file of weights, by name.

    A .pth file may also be a checkpoint of timm's or torchvision's scripts, with the weights (if it has an EMA, those)
    in one of its entries, and their names may begin with "module.". Raises UserError.
    """
    check_file(file)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, about files that it then refuses
            state = timm.models.load_state_dict(str(file), weights_only=True)
        tensors = {str(name): value for name, value in state.items() if isinstance(value, Tensor)}
        odd = next((name for name, value in tensors.items() if value.is_meta or value.layout != torch.strided), None)
        if odd is not None:
            raise ValueError(f"{odd} is a tensor without its values, or a sparse one")
    except Exception as error:  # a damaged or hostile file may make its reader raise anything
        raise UserError(f"--model.weights: {file} cannot be read: {_reason(file, error)}.") from error
    if not tensors:
        raise UserError(f"--model.weights: {file} has no weights: it contains {one_line([*state], 80)}.")
    return tensors


def check_file(file: Path) -> None:
    """Raise UserError unless a file is regular, and begins as a file of its kind does: before anything reads it whole,
    which of a huge one full of zeros would take for ever."""
    if file.suffix not in SUFFIXES:
        raise UserError(f"--model.weights: {file}: expected a file of weights ({', '.join(SUFFIXES[:4])}).")
    try:
        with os.fdopen(open_regular_file(file, follow=True), "rb") as opened:
            head, size = opened.read(TAR_MAGIC.stop), os.fstat(opened.fileno()).st_size
    except OSError as error:
        raise UserError(f"--model.weights: {file} cannot be read: {error.strerror}.") from error
    if file.suffix == ".safetensors":
        fits = 0 < int.from_bytes(head[:8], "little") <= size - 8
    else:  # of torch.save: a zip file, a pickle, or an old tar file
        fits = head[:2] == b"PK" or head[:1] == b"\x80" or head[TAR_MAGIC] == b"ustar"
    if not fits:
        raise UserError(f"--model.weights: {file} cannot be read: it is damaged, or not what its name says.")


def _reason(file: Path, error: Exception) -> str:
    text = reason_of(error, 200)
    if "weights_only" in text:
        found = torch.serialization.get_unsafe_globals_in_checkpoint
        try:
            names = ", ".join(found(str(file)))
        except Exception:
            names = ""
        if names:
            return f"loading it would run code ({one_line(names, 100)}); save its state_dict alone, as safetensors"
        return "it is not a file of torch.save"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"it is damaged, or not what its name says ({text})"
