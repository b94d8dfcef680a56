"""`accel-train export RUN --format timm|onnx|pt2`: the run's model for other programs."""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from torch import nn

from accel_train.analysis.load_run import load_model, read_config
from accel_train.checkpoint.weights import one_of_run
from accel_train.config.schema import Config
from accel_train.errors import UserError, print_line, writing
from accel_train.export.card import model_card
from accel_train.export.folder import check_free, new_folder, put_in_place
from accel_train.export.formats import Loaded, check_installed, load_onnx, load_pt2, write_onnx, write_pt2
from accel_train.export.images import real_images
from accel_train.export.preprocess import FILE, rules_of
from accel_train.export.push import check_login, push
from accel_train.export.timm_directory import load_timm, timm_architecture, write_timm
from accel_train.export.verify import check
from accel_train.launch.environment import Launch
from accel_train.records.model_info import ModelInfo, read_model_info
from accel_train.user_code.reference import short_name


def export(
    launch: Launch,
    run: Path,
    format: str,
    *,
    output: Path | None = None,
    weights: str | None = None,
    push_to_hub: str | None = None,
    trust_code: bool = False,
) -> int:
    """Write the model of the run in the folder `run` as "timm", "onnx" or "pt2", and compare it with the run.

    `output`: a folder; default RUN/export-FORMAT. `weights`: "model" or "ema"; default: the EMA if there is one.
    `push_to_hub`: a repository of the hub that gets the folder, too. Returns the exit code: 1 if the export is not
    what the run's model is (it is left in a folder whose name ends in -failed), or if it cannot be pushed. Raises
    UserError; then nothing has been written.
    """
    launch.check_alone("export")
    check_installed(format)
    shown = output or run / f"export-{format}"
    output = shown.resolve()
    check_free(output)
    config = read_config(run, uses=("model.name",), trust_code=trust_code)
    # What only training has: the exported model computes everything once.
    settings = dataclasses.replace(config.model, gradient_checkpointing=False, freeze_body=False)
    info = read_model_info(run)
    if format == "timm":
        timm_architecture(settings, info)
    name, chosen = one_of_run(run, name=weights)
    if push_to_hub is not None:
        check_login()
    model = load_model(settings, info, chosen)
    kind = " (EMA)" if name == "ema" else ""
    print_line(f"{short_name('model.name', settings.name)}, weights: {chosen.file}{kind}")

    rules = rules_of(info, config.augment)
    with new_folder(output) as folder, tempfile.TemporaryDirectory() as temporary:
        images = real_images(run, config, info, Path(temporary), trust_code=trust_code)
        with writing("--output", shown, "another folder"):
            (folder / FILE).write_text(json.dumps(rules, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            loaded = _write(format, model, config, info, rules, folder)
            found = check(model, loaded, config, info, rules, images)
            card = model_card(run, config, info, format, name, chosen.file, found.lines)
            (folder / "README.md").write_text(card, encoding="utf-8")
            put_in_place(folder, output.with_name(f"{output.name}-failed") if found.failures else output)
    for line in found.lines:
        print_line(line)
    if found.failures:
        print_line(
            f"accel-train: {'; '.join(found.failures)}. Do not use this export; it is in {shown}-failed", sys.stderr
        )
        return 1
    print_line(f"export: {shown}")
    if push_to_hub is not None:
        try:
            print_line(f"pushed: {push(shown, push_to_hub)}")
        except UserError as error:
            print_line(f"accel-train: {error}", sys.stderr)
            return 1
    return 0


def _write(
    format: str, model: nn.Module, config: Config, info: ModelInfo, rules: dict[str, Any], folder: Path
) -> Loaded:
    """Write the model in a format, and return it as it is loaded from there."""
    if format == "timm":
        write_timm(model, config.model, info, rules, folder)
        return load_timm(folder)
    if format == "onnx":
        write_onnx(model, info, rules, folder)
        return load_onnx(folder)
    write_pt2(model, info, rules, folder)
    return load_pt2(folder)
