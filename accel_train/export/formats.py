"""The formats: each is written into a folder, and loaded from it again as a function from inputs to logits."""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accel_train.analysis.loaded_run import LoadedRun
from accel_train.errors import UserError, reason_of
from accel_train.export.preprocess import FILE
from accel_train.records.model_info import ModelInfo

OPSET = 18  # read by onnxruntime from 1.14 on
INPUT, OUTPUT = "images", "logits"
DYNAMIC_BATCH: Any = ({0: torch.export.Dim("batch", min=1)},)
LARGEST_ONNX = 1_900_000_000
"""Bytes: protobuf's limit is 2 GiB, so the weights of larger models get a file of their own."""

Loaded = Callable[[Tensor], Tensor]
"""float32 [b, channels, size, size] to logits [b, classes], both on the CPU."""


def check_installed(format: str) -> None:
    """Raise UserError if the packages of a format are missing."""
    if format != "onnx":
        return
    missing = []
    for name in ("onnx", "onnxruntime", "onnxscript"):
        try:
            __import__(name)
        except ImportError:
            missing.append(name)
    if missing:
        raise UserError(f"--format onnx needs {', '.join(missing)}: pip install 'accel-train[export]'.")


def write_onnx(run: LoadedRun, rules: dict[str, Any], folder: Path) -> None:
    """Write model.onnx; its metadata has the content of preprocess.json."""
    size = sum(tensor.nbytes for tensor in run.model.state_dict().values())
    with quietly("onnx"):
        program: Any = torch.onnx.export(
            run.model,
            (_example(run.info),),
            dynamo=True,
            opset_version=OPSET,
            input_names=[INPUT],
            output_names=[OUTPUT],
            dynamic_shapes=DYNAMIC_BATCH,
            verbose=False,
        )
        program.model.metadata_props[FILE] = json.dumps(rules)
        program.save(str(folder / "model.onnx"), external_data=size > LARGEST_ONNX)


def load_onnx(folder: Path) -> Loaded:
    import onnxruntime

    with quietly("onnx"):
        session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    return lambda inputs: torch.from_numpy(session.run([OUTPUT], {INPUT: inputs.numpy()})[0])


def write_pt2(run: LoadedRun, rules: dict[str, Any], folder: Path) -> None:
    """Write model.pt2; its extra files have preprocess.json."""
    with quietly("pt2"):
        program = torch.export.export(run.model, (_example(run.info),), dynamic_shapes=DYNAMIC_BATCH)
        torch.export.save(program, folder / "model.pt2", extra_files={FILE: json.dumps(rules)})


def load_pt2(folder: Path) -> Loaded:
    with quietly("pt2"):
        module = torch.export.load(folder / "model.pt2").module()
    return lambda inputs: torch.as_tensor(module(inputs))


def _example(info: ModelInfo) -> Tensor:
    return torch.zeros(2, info.channels, info.image_size, info.image_size)  # 2: a batch of 1 might become a constant


@contextmanager
def quietly(format: str) -> Iterator[None]:
    """Without what libraries print. Whatever they raise about a model becomes a UserError."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    except (OSError, UserError):
        raise
    except Exception as error:  # of dozens of types, of which most are not public
        raise UserError(
            f"--format {format}: this model cannot be exported so ({reason_of(error, 200)}); --traceback shows where."
        ) from error
    finally:
        logging.disable(disabled)
