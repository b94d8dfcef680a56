"""`accel-train export RUN --format timm|onnx|pt2`: the run's model for other programs.

Each format is written into a folder, loaded from it again as a function from inputs to logits, and compared with the
run before it is called done. With it goes preprocess.json: how an image file becomes the model's input, for programs
that have neither torch nor this package. docs/export.md documents the file, with a script that follows it.
"""

from __future__ import annotations

import io
import json
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accel_train.config.schema import Augment, Model
from accel_train.data.batch_transform import crop_fraction, resize_default
from accel_train.errors import LOGGER, UserError, needing, reason_of, writing
from accel_train.files import fsync, set_default_permissions
from accel_train.launch.environment import Launch
from accel_train.models.factory import is_timms, more_arguments
from accel_train.records.model_info import ModelInfo
from accel_train.task import SEVERAL_LABELS
from accel_train.tools.load_run import LoadedRun, load
from accel_train.user_code import short_name

INPUTS = 8
"""Seeded random inputs by which an export is compared with the run."""
LARGEST_DIFFERENCE = 1e-3
"""Of the logits, from equal inputs."""


def export(
    launch: Launch,
    run: Path,
    format: str,
    *,
    output: Path | None = None,
    checkpoint: Path | None = None,
    weights: str | None = None,
    trust_code: bool = False,
) -> Path:
    """Write the model of the run in the folder `run` as "timm", "onnx" or "pt2", compare it with the run, and return
    the folder of the export.

    `output`: a folder; default RUN/export-FORMAT. `checkpoint`: see `find_weights`. `weights`: "model" or "ema";
    default: the EMA if there is one.
    Raises UserError, also if the export does not give what the run's model gives; then nothing has been written.
    """
    launch.check_alone("export")
    shown = output or run / f"export-{format}"
    output = shown.resolve()
    _check_free(output)
    loaded = load(run, checkpoint, weights=weights, trust_code=trust_code)
    check_format(format, loaded.config.model)
    LOGGER.info(loaded.title)

    rules = rules_of(loaded.info, loaded.config.augment)
    with writing("--output", shown, "another folder"):
        output.parent.mkdir(parents=True, exist_ok=True)
        beside = tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.", ignore_cleanup_errors=True)
    with beside as temporary:
        folder = Path(temporary, "export")
        with writing("--output", shown, "another folder"):
            folder.mkdir()
            (folder / FILE).write_text(json.dumps(rules, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            write, reload = FORMATS[format]
            write(loaded, rules, folder)
            LOGGER.info(compare(loaded, reload(folder)))
            for path in list(folder.iterdir()):
                set_default_permissions(path)
                fsync(path)
            fsync(folder)
            folder.rename(output)
    return shown


def _check_free(output: Path) -> None:
    """Raise UserError unless `output` does not exist or is an empty folder."""
    if output.exists() and not output.is_dir():
        raise UserError(f"--output: {output} is a file; name a folder.")
    if output.exists() and (there := sorted(path.name for path in output.iterdir())):
        raise UserError(f"--output: {output} is not empty (found {there[0]}); remove it, or name another folder.")


def compare(run: LoadedRun, exported: Loaded) -> str:
    """Compare an export with the run's model, both on the CPU, on the same inputs, in one batch and one alone; return a
    sentence about it. Raises UserError if they differ."""
    generator, info = torch.Generator().manual_seed(0), run.info
    inputs = torch.randn(INPUTS, info.channels, info.image_size, info.image_size, generator=generator)
    all_and_one = inputs, inputs[:1]
    differences = [_logits(run.model, some) - _logits(exported, some) for some in all_and_one]
    difference = float(torch.cat(differences).abs().max())
    if not difference <= LARGEST_DIFFERENCE:  # also if it is NaN
        raise UserError(
            f"from equal inputs the logits differ by up to {difference:.3g}, more than {LARGEST_DIFFERENCE}. The "
            "export was not written.",
            code=1,
        )
    return f"loaded again: from {INPUTS} equal inputs the logits differ by at most {difference:.1e}"


def _logits(model: Loaded | nn.Module, inputs: Tensor) -> Tensor:
    with torch.inference_mode():
        return model(inputs).float()


FILE = "preprocess.json"


def rules_of(info: ModelInfo, augment: Augment) -> dict[str, Any]:
    """The content of preprocess.json: what `Preprocessing` does."""
    files = info.takes_files
    return {
        "version": 1,
        "mode": {1: "L", 3: "RGB"}[info.channels] if files else None,
        "steps": _steps(info, augment) if files else None,
        "interpolation": augment.interpolation,  # the name is Pillow's, too
        "channels": info.channels,
        "size": info.image_size,
        "full_scale": info.full_scale,
        "mean": list(info.mean),
        "std": list(info.std),
        "classes": list(info.classes),
        "multi_label": info.task is SEVERAL_LABELS,
        "probabilities": info.task.activation,
    }


def _steps(info: ModelInfo, augment: Augment) -> list[dict[str, int]]:
    """Each step resizes the short side and cuts the central square, whose corner is rounded half to even."""
    size, native = info.image_size, info.native_size
    augment = augment.in_evaluation(size)
    if native is None:
        return [{"resize": augment.resize or resize_default(size), "crop": size}]
    steps, side = [{"resize": native, "crop": native}], augment.resize or size
    if (side - size) % 4 == 3:
        # BatchTransform rounds the corner down. Half to even would round (side - size) / 2 up here: so first one row
        # and one column are cut off at the end, and then nothing is left to be rounded.
        steps += [{"resize": side, "crop": side - 1}, {"resize": side - 1, "crop": size}]
    elif (side, size) != (native, native):
        steps.append({"resize": side, "crop": size})
    return steps


OPSET = 18  # read by onnxruntime from 1.14 on
INPUT, OUTPUT = "images", "logits"
DYNAMIC_BATCH: Any = ({0: torch.export.Dim("batch", min=1)},)
Loaded = Callable[[Tensor], Tensor]
"""float32 [b, channels, size, size] to logits [b, classes], both on the CPU."""


def check_format(format: str, model: Model) -> None:
    """Raise UserError if the packages of a format are missing, or if it is timm and the architecture is not timm's."""
    if format == "onnx":
        with needing("--format onnx needs onnx, onnxruntime and onnxscript: pip install 'accel-train[export]'."):
            for name in ("onnx", "onnxruntime", "onnxscript"):
                __import__(name)
    if format == "timm" and not is_timms(model.name):
        name = short_name("model.name", model.name)
        raise UserError(f"--format timm: {name} is not an architecture of timm's; use --format onnx or pt2.")


def write_onnx(run: LoadedRun, rules: dict[str, Any], folder: Path) -> None:
    """Write model.onnx; its metadata has the content of preprocess.json."""
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
        program.save(str(folder / "model.onnx"))  # beyond 1.5 GiB with the weights in a file of their own


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


# Entries of timm's model configuration that are still true after a training.
KEPT = ("architecture", "fixed_input_size", "first_conv", "classifier")


def write_timm(run: LoadedRun, rules: dict[str, Any], folder: Path) -> None:
    """Write config.json and model.safetensors, as timm itself does for the hub."""
    from timm.models import save_for_hf

    model: Any = run.model
    info, published, arguments = run.info, model.pretrained_cfg, more_arguments(run.config.model)
    size = info.image_size
    config = {key: published[key] for key in KEPT if key in published} | {
        "input_size": (info.channels, size, size),
        "mean": info.mean,
        "std": info.std,
        "interpolation": rules["interpolation"],
        "crop_pct": crop_fraction(size, rules["steps"][-1]["resize"]) if rules["steps"] else 1.0,
        "crop_mode": "center",
    }
    if published.get("fixed_input_size"):
        arguments["img_size"] = info.training_size
    if info.channels != 3:
        arguments["in_chans"] = info.channels
        config.pop("first_conv", None)  # else timm might adapt the first layer from three channels once more
    model.pretrained_cfg = config
    with quietly("timm"):
        save_for_hf(model, folder, {"label_names": info.classes}, arguments, safe_serialization=True)


def load_timm(folder: Path) -> Loaded:
    import timm

    with quietly("timm"):
        model: nn.Module = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    return model


FORMATS = {"timm": (write_timm, load_timm), "onnx": (write_onnx, load_onnx), "pt2": (write_pt2, load_pt2)}
