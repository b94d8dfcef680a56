"""What the commands of several trainers need."""

from __future__ import annotations

from accel_train.convert.translation import Translation


def set_batch(translation: Translation, of_process: int, passes: int = 1) -> None:
    """Set the batch of an update from that of each process: there BatchNorm sees the images of one process."""
    processes = translation.processes
    parts = [(processes, "processes"), (passes, "accumulated passes"), (of_process, "images")]
    counted = " x ".join(f"{number} {name}" for number, name in parts if number > 1 or name == "images")
    translation.set("batch-size", processes * passes * of_process, counted)
    translation.set("virtual-batch-size", of_process, "BatchNorm sees the images of one process there")


def mix_whole_batches(translation: Translation, of: str) -> None:
    """Mixup and cutmix have one share for a whole batch of a process, the virtual batch here, and choose one of both
    for it. `of`: the option there that says so."""
    size = translation.settings["virtual-batch-size"].value
    if size % 2 == 0:
        translation.set("augment.mix-mode", "batch", "of a virtual batch", of=of)
        return
    translation.lose(
        of, f"Images are mixed in pairs here, and {size} is an odd number; in the recipe nothing is mixed."
    )
    for key in ("augment.mixup", "augment.cutmix", "augment.cutmix-minmax"):
        translation.settings.pop(key, None)


def set_compilation(translation: Translation, backend: str | None, mode: str | None) -> None:
    """Say that the launcher compiles the model by torch.compile. None: it does not; torch's usual mode."""
    if backend:
        translation.launch += [f"--dynamo_backend {backend}", *[f"--dynamo_mode {mode}"] * bool(mode)]
