"""`yolo classify train`: what its options are here. Read in ultralytics 8.4.190."""

from __future__ import annotations

from accel_train.convert.common import set_batch, set_compilation
from accel_train.convert.translation import To, Translation, rounded
from accel_train.errors import UserError

DATA = {"mnist": "mnist", "fashion-mnist": "fashion_mnist", "cifar10": "cifar10", "cifar100": "cifar100"}
OPTIMIZERS = ("sgd", "adam", "adamax", "adamw", "nadam", "radam", "rmsprop")
OTHER_MODEL = "resnet18"

TABLE: dict[str, str | To] = {
    "epochs": "epochs",
    "seed": "seed",
    "dropout": To("model.dropout", fine=(0.0,)),
    "fliplr": "augment.flip",
    "flipud": To("augment.vertical-flip", fine=(0.0,)),
    "auto-augment": "augment.policy",
    "erasing": "augment.erase",
}
MEASURED: dict[str, str | To] = {
    "save-period": To("checkpoint.milestone-epochs", fine=(-1,)),
    "workers": "data.workers",
}
HARMLESS = """
task mode cache device project name exist-ok verbose deterministic profile channels-last val split
save-json conf iou max-det dnn plots nms source vid-stride stream-buffer visualize augment agnostic-nms
retina-masks embed show save-frames save-txt save-conf save-crop show-labels show-conf show-boxes line-width format
optimize dynamic simplify opset workspace box cls dfl pose kobj rle angle dlog dgrad dlam overlap-mask mask-ratio
degrees translate shear perspective bgr mosaic mixup cutmix copy-paste copy-paste-mode close-mosaic tracker resume
cfg dis
""".split()  # noqa: SIM905
"""Many are for detection: classification does not use mosaic, mixup or degrees."""


def translate(t: Translation) -> None:
    """Write the recipe of a `yolo classify train` command."""
    if t["task"] != "classify" or t["mode"] != "train":
        raise UserError(
            f"yolo {t['task']} {t['mode']}: only `yolo classify train` can be converted; this trainer is for "
            "classification."
        )
    t.set("model.name", OTHER_MODEL, "in place of ultralytics' model")
    t.lose("model", "ultralytics' models are in that package only; choose one of timm's or torchvision's.")
    t["pretrained"], t["cls-remap"]  # they belong to the model
    t.ignore("classes", "cls-remap", "multi-scale", "rect", because="in a training of its classifiers")
    saving(t)
    data(t)
    processes = t.processes = max(t.processes, devices(t["device"]))
    batch, passes = t["batch"], max(round(t["nbs"] / t["batch"]), 1)
    if not isinstance(batch, int) or batch < processes:
        raise UserError(f"batch={batch}: ultralytics chooses it by the GPU's memory; give the number that it found.")
    set_batch(t, batch // processes, passes)
    optimizer(t, batch, passes, passes * processes)
    t.apply(TABLE)
    t.apply(MEASURED, only_given=True)
    preprocessing(t)
    schedule(t, passes)
    t.set("ema.enabled", True, "always, there")
    t.set("ema.decay", 0.9999)
    t.lose("EMA", "Its decay grows as 0.9999 (1 - exp(-updates / 2000)) there; ema.warmup grows in another way.")
    end(t)
    t.differs.append("fitness: the best checkpoint and patience go by the mean of top-1 and top-5 there")
    if t["amp"] and t["amp"] != "fp32":
        t.launch.append("--mixed_precision " + ("bf16" if t["amp"] == "bf16" else "fp16"))
    mode = t["compile"]
    set_compilation(t, "inductor" if mode else None, mode if isinstance(mode, str) else None)
    t.finish(HARMLESS)


def saving(t: Translation) -> None:
    """save=False: only the last epoch's checkpoint is written."""
    if not t["save"]:
        t.set("checkpoint.every-epochs", max(round(t["epochs"]), 1), "save=False: at the end only")
        t.set("checkpoint.every-seconds", 0.0)


def devices(device: object) -> int:
    """Return how many processes device=0,1 starts."""
    words = device if isinstance(device, (list, tuple)) else str(device or "0").strip("[]() ").split(",")
    return max(len([word for word in words if str(word).strip()]), 1)


def end(t: Translation) -> None:
    """When the run ends: after its epochs, earlier without progress, or after some hours."""
    if t["patience"] and t["patience"] < t["epochs"]:
        t.set("stop.patience-epochs", t["patience"], "needs a validation split")
    if t["time"]:
        t.set("stop.hours", t["time"])
        t.lose("time", "The epochs follow from the time there; here the earlier end counts.")


def data(t: Translation) -> None:
    """A data set that can be downloaded here too, or a folder."""
    name = str(t["data"] or "")
    if name in DATA:
        t.set("data.name", DATA[name])
        return
    t.set("data.name", "folder")
    if name:
        t.set("data.root", name, "a folder; ultralytics downloads some data sets by their names")
    if t.is_given("fraction"):
        t.lose("fraction")
    if t.is_given("freeze"):
        t.lose(
            "freeze",
            "It counts the layers of ultralytics' model; model.freeze counts those of the model that you choose, or "
            "has their names.",
        )


def optimizer(t: Translation, batch: int, passes: int, gradients: int) -> None:
    """The optimizer, whose gradient there is a sum of `gradients` means: over processes and accumulated passes.

    SGD with a gradient k times as large learns as one with k times the rate and a k-th of the weight decay and of the
    clipping; Adam and those like it do not see the size of a gradient.
    """
    decay = t["weight-decay"] * batch * passes / t["nbs"]
    name, rate, scale = str(t["optimizer"]).lower(), t["lr0"], gradients
    automatic = name == "auto"
    if name == "musgd":
        t.lose("optimizer", "MuSGD is in ultralytics only.")
        name = "sgd"
    if automatic:
        t.lose("optimizer", "auto: MuSGD for more than 10,000 updates, else AdamW with lr 0.01 / (4 + classes).")
        name, rate = "adamw", round(0.01 / (4 + 10), 6)
        t.differs.append("optimizer=auto: adamw with the rate for 10 classes was written")
    if name not in OPTIMIZERS:
        t.lose("optimizer", f"Known here: {', '.join(OPTIMIZERS)}.")
        name = "sgd"
    if name != "sgd":
        scale = 1
    counted = f"{rate:g} x {scale}: gradients are summed over passes and processes there" if scale > 1 else ""
    t.set("optim.name", name)
    t.set("optim.lr", rounded(rate * scale), counted)
    share = 1 if name == "adamw" else gradients  # AdamW does not add the decay to the gradient
    comment = f"{t['weight-decay']:g} x {batch} x {passes} / nbs {t['nbs']}" + f", / {share}" * (share > 1)
    t.set("optim.weight-decay", rounded(decay / share), comment)
    t.set("optim.clip", rounded(10 / gradients), "10 for the sum of gradients")
    if name == "rmsprop":
        t.lose("optimizer", "torch's RMSprop has alpha 0.99 there; timm's, which is used here, 0.9.")
    if name in ("sgd", "rmsprop"):
        t.set("optim.momentum", t["momentum"])
    else:
        t.set("optim.betas", [0.9 if automatic else t["momentum"], 0.999])


def preprocessing(t: Translation) -> None:
    """Training: a random resized crop and the policy, or colour jitter without one. Evaluation: a centre crop."""
    size = t["imgsz"] if "imgsz" in t.command.given else 224
    t.set("model.image-size", size, of="imgsz")
    t.set("augment.resize", size, of="imgsz")
    t.set("augment.crop", "resized")
    t.set("augment.scale", [rounded(1 - t["scale"]), 1.0], of="scale")
    t.set("augment.interpolation", "bilinear")
    t.set("augment.mean", [0.0, 0.0, 0.0])
    t.set("augment.std", [1.0, 1.0, 1.0])
    jitter = [t["hsv-v"], t["hsv-v"], t["hsv-s"], t["hsv-h"]]
    if not t["auto-augment"]:
        t.set("augment.color-jitter", jitter, of="hsv-h")


def schedule(t: Translation, passes: int) -> None:
    """The rate falls to lrf of lr0. In a warm-up it rises, with the momentum, and that of biases falls."""
    rate, lr = t.settings["optim.lr"].value, t["lr0"]
    t.set("schedule.name", "cosine" if t["cos-lr"] else "poly", of="cos-lr")
    t.set("schedule.min-lr", rounded(rate * t["lrf"]), f"lrf {t['lrf']:g} of optim.lr")
    warmup = min(t["warmup-epochs"], max(t["epochs"] - 1, 0))
    biases, momentum = t["warmup-bias-lr"], t["warmup-momentum"]
    if not warmup:
        t.set("schedule.per", "epoch", "as there")
        t.ignore("warmup-bias-lr", "warmup-momentum", because="without a warm-up")
        return
    t.set("schedule.per", "epoch", "as there; the warm-up rises at each update")
    t.set("schedule.warmup-epochs", warmup)
    t.set("schedule.warmup-method", "scaled")
    if str(t["optimizer"]).lower() != "auto":  # with it, ultralytics lets biases begin with 0 as all others
        scale = rate / lr if lr else 1
        t.set("schedule.warmup-bias-lr", rounded(biases * scale), f"{biases:g} x {scale:g}, as optim.lr" * (scale != 1))
    if "optim.momentum" in t.settings:  # the betas of Adam do not change there
        t.set("schedule.warmup-momentum", momentum)
    if passes > 1:
        t.lose("nbs", f"In the warm-up accumulation grows from 1 to {passes} passes there.")
