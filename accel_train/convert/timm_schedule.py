"""The learning rate of timm's train.py, and how it changes. Read in 1.0.29.dev0."""

from __future__ import annotations

import math

from accel_train.convert.translation import Translation, rounded


def learning_rate(t: Translation) -> None:
    """The learning rate: that of the whole batch, from --lr-base if --lr is not given."""
    if t["lr"]:
        t.set("optim.lr", t["lr"], of="lr")
        return
    batch = t["batch-size"] * t.processes * max(t["grad-accum-steps"], 1)
    scale = t["lr-base-scale"] or ("sqrt" if any(word in t["opt"].lower() for word in ("ada", "lamb")) else "linear")
    ratio = batch / t["lr-base-size"]
    ratio = math.sqrt(ratio) if scale == "sqrt" else ratio
    comment = f"{t['lr-base']:g} for a batch of {t['lr-base-size']}, {scale} scaling"
    t.set("optim.lr", rounded(t["lr-base"] * ratio), comment, of="lr-base")


def schedule(t: Translation) -> None:
    """The schedule. timm's counts epochs, unless --sched-on-updates is given."""
    name, warmup, epochs = t["sched"], t["warmup-epochs"], t["epochs"]
    prefix, falls = t["warmup-prefix"], name in ("cosine", "poly")
    if name == "none":
        name, warmup = "constant", 0
    names = ("cosine", "step", "multistep", "poly", "plateau", "constant")
    if name not in names:
        t.lose("sched", f"Not supported; schedules here: {', '.join(names)}.")
    else:
        t.set("schedule.name", name)
    t.set("epochs", epochs + warmup * bool(prefix) + t["cooldown-epochs"] * falls)
    if t["cooldown-epochs"] and falls:
        t.set("schedule.cooldown-epochs", t["cooldown-epochs"])
    if warmup:
        t.set("schedule.warmup-epochs", warmup)
        t.set("schedule.warmup-lr", t["warmup-lr"])
    if name in ("cosine", "poly", "plateau") and t["min-lr"]:
        t.set("schedule.min-lr", t["min-lr"])
    if falls and t["lr-k-decay"] != 1:
        t.set("schedule.k-decay", t["lr-k-decay"])
    if name == "step":
        t.set("schedule.step-epochs", t["decay-epochs"])
        t.set("schedule.decay", t["decay-rate"])
    elif name == "multistep":
        ends = milestones(t["decay-milestones"], bool(t["sched-on-updates"]))
        t.set("schedule.milestones", ends, "timm decays one epoch before its milestones", of="decay-milestones")
        t.set("schedule.decay", t["decay-rate"])
    elif name == "poly":
        t.set("schedule.power", t["decay-rate"], "timm's --decay-rate is the power of poly")
    elif name == "plateau":
        t.set("schedule.patience-epochs", t["patience-epochs"])
        t.set("schedule.decay", t["decay-rate"])
        t.lose("sched", "Its plateau must rise by 0.01 % to count; here any rise counts.")
    if warmup and falls:
        t.set("schedule.warmup-prefix", bool(prefix))
    elif warmup and name in ("step", "multistep") and prefix:
        t.lose("warmup-prefix", "Epochs of decay are counted from the start of the run.")
    fraction = name == "step" and not float(t["decay-epochs"]).is_integer()
    if name in names and not t["sched-on-updates"] and (warmup or falls or fraction):
        t.set("schedule.per", "epoch", "as timm without --sched-on-updates")

    ignore_unused(t, name, bool(warmup))


USED_BY = {  # options of some schedules -> which those are
    "decay-epochs": ("step",),
    "decay-milestones": ("multistep",),
    "decay-rate": ("step", "multistep", "poly", "plateau"),
    "cooldown-epochs": ("cosine", "poly"),
    "patience-epochs": ("plateau",),
    "min-lr": ("cosine", "poly", "plateau"),
    "lr-k-decay": ("cosine", "poly"),
    "lr-cycle-mul": ("cosine", "poly"),
    "lr-cycle-decay": ("cosine", "poly"),
    "lr-cycle-limit": ("cosine", "poly"),
}


def ignore_unused(t: Translation, name: str, warms_up: bool) -> None:
    """Note the options of other schedules than the one `name`."""
    unused = [option for option, schedules in USED_BY.items() if name not in schedules]
    t.ignore(*unused, because=f"with --sched {name}")
    if not warms_up:
        t.ignore("warmup-lr", because="without a warm-up")


def milestones(epochs: list[int], on_updates: bool) -> list[int]:
    """Return the epochs after which the rate decays. timm compares its milestones with the next epoch or update."""
    return list(epochs) if on_updates else [epoch - 1 for epoch in epochs if epoch > 1]
