"""`accel-train export RUN --format timm|onnx|pt2`: the run's model for other programs."""

from __future__ import annotations

import json
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from accel_train.errors import LOGGER, UserError, writing
from accel_train.files import fsync, set_default_permissions
from accel_train.launch.environment import Launch
from accel_train.tools.export.card import model_card
from accel_train.tools.export.compare import check, real_images
from accel_train.tools.export.formats import FORMATS, check_installed, timm_architecture
from accel_train.tools.export.preprocess import FILE, rules_of
from accel_train.tools.load_run import load

FILES = {FILE, "README.md", "model.onnx", "model.onnx.data", "model.pt2", "config.json", "model.safetensors"}
"""All that exports write."""


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
    _check_free(output)
    loaded = load(run, checkpoint, weights=weights, trust_code=trust_code)
    if format == "timm":
        timm_architecture(loaded.config.model, loaded.info)
    LOGGER.info(loaded.title)

    rules = rules_of(loaded.info, loaded.config.augment)
    with writing("--output", shown, "another folder"):
        output.parent.mkdir(parents=True, exist_ok=True)
        beside = tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.", ignore_cleanup_errors=True)
    with beside as temporary:
        folder, images = Path(temporary, "export"), Path(temporary, "images")
        images.mkdir()
        compared = real_images(loaded, images, trust_code=trust_code)
        with writing("--output", shown, "another folder"):
            folder.mkdir()
            (folder / FILE).write_text(json.dumps(rules, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            write, reload = FORMATS[format]
            write(loaded, rules, folder)
            found = check(loaded, reload(folder), rules, compared)
            (folder / "README.md").write_text(model_card(loaded, format, found.lines), encoding="utf-8")
            _put_in_place(folder, output.with_name(f"{output.name}-failed") if found.failures else output)
    for line in found.lines:
        LOGGER.info(line)
    if found.failures:
        raise UserError(f"{'; '.join(found.failures)}. Do not use this export; it is in {shown}-failed.", code=1)
    return ExportResult(shown, tuple(sorted(shown.iterdir())))


def _check_free(output: Path) -> None:
    """Raise UserError unless `output` does not exist, is empty, or holds nothing but an earlier export."""
    if not output.exists():
        return
    if not output.is_dir():
        raise UserError(f"--output: {output} is a file; name a folder.")
    names = {path.name for path in output.iterdir()}
    others = names - FILES or (names if FILE not in names else set())
    if others:
        raise UserError(f"--output: {output} holds other files ({', '.join(sorted(others)[:3])}); name another folder.")


def _put_in_place(folder: Path, output: Path) -> None:
    """Rename the complete `folder`, in a temporary one, to `output`. An earlier export there is removed with that one.

    Raises UserError and OSError.
    """
    _check_free(output)
    for path in list(folder.iterdir()):
        set_default_permissions(path)
        fsync(path)
    fsync(folder)
    earlier = folder.with_name("earlier")
    if output.exists():
        output.rename(earlier)
    try:
        folder.rename(output)
    except OSError:
        with suppress(OSError):
            earlier.rename(output)
        raise
