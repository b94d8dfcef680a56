"""`accel-train export RUN --format timm|onnx|pt2`: the run's model for other programs."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

from accel_train.analysis.loaded_run import load
from accel_train.errors import LOGGER, UserError, writing
from accel_train.export.card import model_card
from accel_train.export.folder import check_free, new_folder, put_in_place
from accel_train.export.formats import check_installed, load_onnx, load_pt2, write_onnx, write_pt2
from accel_train.export.images import real_images
from accel_train.export.preprocess import FILE, rules_of
from accel_train.export.timm_directory import load_timm, timm_architecture, write_timm
from accel_train.export.verify import check
from accel_train.launch.environment import Launch

FORMATS = {"timm": (write_timm, load_timm), "onnx": (write_onnx, load_onnx), "pt2": (write_pt2, load_pt2)}


@dataclass(frozen=True)
class ExportResult:
    """An export that gives what the run's model gives."""

    folder: Path
    files: tuple[Path, ...]


def export(
    launch: Launch,
    run: Path,
    format: str,
    *,
    output: Path | None = None,
    checkpoint: Path | None = None,
    weights: str | None = None,
    trust_code: bool = False,
) -> ExportResult:
    """Write the model of the run in the folder `run` as "timm", "onnx" or "pt2", and compare it with the run.

    `output`: a folder; default RUN/export-FORMAT. `checkpoint`: see `find_weights`. `weights`: "model" or "ema";
    default: the EMA if there is one.
    Raises UserError; then nothing has been written, unless the export is not what the run's model is: it is left in a
    folder whose name ends in -failed.
    """
    launch.check_alone("export")
    check_installed(format)
    shown = output or run / f"export-{format}"
    output = shown.resolve()
    check_free(output)
    loaded = load(run, checkpoint, weights=weights, trust_code=trust_code)
    if format == "timm":
        timm_architecture(loaded.config.model, loaded.info)
    LOGGER.info(loaded.title)

    rules = rules_of(loaded.info, loaded.config.augment)
    with new_folder(output) as folder, tempfile.TemporaryDirectory() as temporary:
        images = real_images(loaded, Path(temporary), trust_code=trust_code)
        with writing("--output", shown, "another folder"):
            (folder / FILE).write_text(json.dumps(rules, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            write, reload = FORMATS[format]
            write(loaded, rules, folder)
            found = check(loaded, reload(folder), rules, images)
            card = model_card(run, format, loaded.weights, found.lines)
            (folder / "README.md").write_text(card, encoding="utf-8")
            put_in_place(folder, output.with_name(f"{output.name}-failed") if found.failures else output)
    for line in found.lines:
        LOGGER.info(line)
    if found.failures:
        raise UserError(f"{'; '.join(found.failures)}. Do not use this export; it is in {shown}-failed.", code=1)
    return ExportResult(shown, tuple(sorted(shown.iterdir())))
