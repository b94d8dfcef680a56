"""torchvision's references/classification/train.py and presets.py: what their options are here. Read at 775dd2d."""

from __future__ import annotations

from accel_train.convert.common import mix_whole_batches, set_batch
from accel_train.convert.translation import To, Translation, rounded
from accel_train.errors import UserError

POLICIES = {"ra": "randaugment", "ta_wide": "trivialaugment", "augmix": "augmix", "imagenet": "autoaugment"}
POLICIES |= {"cifar10": "autoaugment_cifar10", "svhn": "autoaugment_svhn"}
SCHEDULES = ("steplr", "cosineannealinglr", "exponentiallr")


TABLE: dict[str, str | To] = {
    "lr": "optim.lr",
    "momentum": To("optim.momentum", when=lambda t: t["opt"].lower() != "adamw"),
    "weight-decay": "optim.weight-decay",
    "norm-weight-decay": "optim.norm-weight-decay",
    "bias-weight-decay": "optim.bias-weight-decay",
    "transformer-embedding-decay": "optim.embedding-weight-decay",
    "clip-grad-norm": "optim.clip",
    "label-smoothing": "loss.label-smoothing",
    "epochs": "epochs",
    "interpolation": To("augment.interpolation", {"nearest-exact": "nearest"}),  # of Pillow's images they are the same
    "auto-augment": To("augment.policy", POLICIES),
    "ra-magnitude": To("augment.randaugment-magnitude", when=lambda t: t["auto-augment"] == "ra"),
    "augmix-severity": To("augment.augmix-severity", when=lambda t: t["auto-augment"] == "augmix"),
    "random-erase": To("augment.erase", fine=(0.0,)),
    "mixup-alpha": To("augment.mixup", fine=(0.0,)),
    "cutmix-alpha": To("augment.cutmix", fine=(0.0,)),
    "sync-bn": To("model.sync-batchnorm", fine=(False,), when=lambda t: t.processes > 1),
}
MEASURED: dict[str, str | To] = {"workers": "data.workers", "print-freq": "log-every-updates"}
HARMLESS = """
device output-dir resume cache-dataset world-size dist-url use-deterministic-algorithms use-v2
""".split()  # noqa: SIM905


def translate(t: Translation) -> None:
    """Write the recipe of a command of torchvision's train.py."""
    if t["test-only"]:
        raise UserError("--test-only: this command trains nothing. To evaluate a run: accel-train evaluate RUN.")
    model(t)
    if t.is_given("data-path"):
        t.set("data.root", t["data-path"])
    t.set("data.name", "folder")
    set_batch(t, t["batch-size"])
    optimizer(t)
    t.apply(TABLE)
    t.apply(MEASURED, only_given=True)
    schedule(t)
    preprocessing(t)
    if t["mixup-alpha"] > 0 or t["cutmix-alpha"] > 0:
        mix_whole_batches(t, "mixup-alpha" if t["mixup-alpha"] > 0 else "cutmix-alpha")
    average(t)
    if t["ra-sampler"] and t.processes > 1:
        t.set("data.repeats", t["ra-reps"], of="ra-reps")
    else:
        t.ignore("ra-sampler", "ra-reps", because="without --ra-sampler on several processes")
    if t["amp"]:
        t.launch.append("--mixed_precision fp16")
    if t["start-epoch"] and t["resume"]:
        t.ignore("start-epoch", because="with --resume, whose checkpoint says the epoch")
    elif t["start-epoch"]:
        t.lose(
            "start-epoch", "The last epochs alone, with the beginning of the schedule; here a run begins at its first."
        )
    if t["backend"].lower() != "pil":
        t.differs.append(f"--backend {t['backend']}: policies change PIL images here, whose pixels differ by rounding")
    t.finish(HARMLESS)


def model(t: Translation) -> None:
    """The model, and the published weights that it begins with."""
    name, given = f"torchvision/{t['model']}", t["weights"]
    if given:
        from accel_train.models.torchvision_models import published_weights

        kind, _, weights = given.rpartition(".")
        found = published_weights(f"{name}.{weights}")
        if kind not in ("", type(found).__name__):
            raise UserError(f"--weights {given}: of another model; those of {t['model']} are {type(found).__name__}.")
        name += f".{found.name}"
        t.set("model.pretrained", True)
    t.set("model.name", name, of="model")


def optimizer(t: Translation) -> None:
    """The optimizer, and which weights decay: all, unless other rates are given for some."""
    name = t["opt"].lower()
    ours = "sgd" if "nesterov" in name else "momentum" if name == "sgd" else name  # sgd has Nesterov's momentum here
    t.set("optim.name", ours, of="opt")
    if name == "rmsprop":
        t.set("optim.eps", 0.0316, "torchvision's, with alpha 0.9, which timm's rmsprop has too")
    t.set("optim.decay-all", True, "all weights decay there, unless a rate is given for some")


def schedule(t: Translation) -> None:
    """The schedule, which counts epochs there; that after a warm-up is counted from its end."""
    name, warmup, epochs = t["lr-scheduler"].lower(), t["lr-warmup-epochs"], t["epochs"]
    if name not in SCHEDULES:
        raise UserError(f"--lr-scheduler {name}: torchvision's has only {', '.join(SCHEDULES)}.")
    interval = t["lr-step-size"] if name == "steplr" else 1
    if name == "cosineannealinglr":
        t.set("schedule.name", "cosine")
        if t["lr-min"]:
            t.set("schedule.min-lr", t["lr-min"])
    elif warmup:
        ends = list(range(warmup + interval, epochs, interval)) or [epochs]
        t.set("schedule.name", "multistep")
        t.set("schedule.milestones", ends, f"every {interval} epochs, counted from the end of the warm-up")
    else:
        t.set("schedule.name", "step")
        t.set("schedule.step-epochs", interval)
    if name != "cosineannealinglr":
        t.set("schedule.decay", t["lr-gamma"])
    if warmup:
        t.set("schedule.warmup-epochs", warmup)
        start = rounded(t["lr"] * t["lr-warmup-decay"])
        t.set("schedule.warmup-lr", start, f"--lr-warmup-decay {t['lr-warmup-decay']:g} x --lr")
        t.set("schedule.warmup-method", t["lr-warmup-method"], of="lr-warmup-method")
    else:
        t.ignore("lr-warmup-method", "lr-warmup-decay", because="without a warm-up")
    if name == "cosineannealinglr":
        t.ignore("lr-gamma", "lr-step-size", because="with a cosine")
    else:
        t.ignore("lr-min", because=f"with {name}")
        if name == "exponentiallr":
            t.ignore("lr-step-size", because="with exponentiallr")
    if warmup or name == "cosineannealinglr":
        t.set("schedule.per", "epoch", "torchvision's schedulers step after each epoch")


def preprocessing(t: Translation) -> None:
    """torchvision's presets: a random resized crop and flip in training, resize and centre crop in evaluation."""
    t.set("model.image-size", t["train-crop-size"], of="train-crop-size")
    if t["val-crop-size"] != t["train-crop-size"]:
        t.set("model.eval-image-size", t["val-crop-size"], of="val-crop-size")
    t.set("augment.resize", t["val-resize-size"], of="val-resize-size")
    t.set("augment.crop", "resized", "torchvision's preset, as are flip, mean and std")
    t.set("augment.flip", 0.5)
    t.set("augment.mean", [0.485, 0.456, 0.406])
    t.set("augment.std", [0.229, 0.224, 0.225])


def average(t: Translation) -> None:
    """The EMA, which is updated every few updates, and is the model itself in the warm-up."""
    if not t["model-ema"]:
        t.ignore("model-ema-steps", "model-ema-decay", because="without --model-ema")
        return
    t.set("ema.enabled", True)
    decay, steps = t["model-ema-decay"], t["model-ema-steps"]
    if t.settings["schedule.name"].value == "cosine":
        t.set("ema.decay", decay, of="model-ema-decay")
        t.set("ema.scale-decay", True, "as torchvision adjusts it to the batch, the steps and the epochs")
    else:  # scale-decay needs a schedule that fixes the epochs
        adjusted = adjusted_decay(decay, t["batch-size"] * t.processes, steps, t["epochs"])
        t.set("ema.decay", rounded(adjusted), f"{decay:g}, adjusted as torchvision does", of="model-ema-decay")
    t.set("ema.every-updates", steps, of="model-ema-steps")
    if t["lr-warmup-epochs"]:
        t.set("ema.after-epochs", t["lr-warmup-epochs"], "it equals the weights in the warm-up")


def adjusted_decay(decay: float, batch: int, steps: int, epochs: int) -> float:
    """Return what torchvision makes of --model-ema-decay, so that it depends less on the batch and the epochs."""
    return 1 - min(1.0, (1 - decay) * batch * steps / epochs)
