"""The learning rate of timm's train.py, and how it changes. Read in 1.0.29.dev0."""

from __future__ import annotations

import math

from accel_train.config.declaration import CYCLIC
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
    prefix, falls = t["warmup-prefix"], name in CYCLIC
    if name == "none":
        name, warmup = "constant", 0
    names = (*CYCLIC, "step", "multistep", "plateau", "constant")
    if name not in names:
        t.lose("sched", f"Not supported; schedules here: {', '.join(names)}.")
    else:
        t.set("schedule.name", name)
    cooldown = t["cooldown-epochs"] * falls
    if falls and t["lr-cycle-limit"] > 1:
        cycles(t, warmup * bool(prefix), cooldown)
    else:
        t.set("epochs", epochs + warmup * bool(prefix) + cooldown)
        if cooldown:
            t.set("schedule.cooldown-epochs", cooldown)
    if warmup:
        t.set("schedule.warmup-epochs", warmup)
        t.set("schedule.warmup-lr", t["warmup-lr"])
    if name in (*CYCLIC, "plateau") and t["min-lr"]:
        t.set("schedule.min-lr", t["min-lr"])
    if name in ("cosine", "poly") and t["lr-k-decay"] != 1:
        t.set("schedule.k-decay", t["lr-k-decay"])
    if name == "step":
        t.set("schedule.step-epochs", t["decay-epochs"])
        t.set("schedule.decay", t["decay-rate"])
    elif name == "multistep":
        ends = milestones(t["decay-milestones"], bool(t["sched-on-updates"]))
        ends = [end + warmup * bool(prefix) for end in ends]
        t.set("schedule.milestones", ends, "timm decays one epoch before its milestones", of="decay-milestones")
        t.set("schedule.decay", t["decay-rate"])
    elif name == "poly":
        t.set("schedule.power", t["decay-rate"], "timm's --decay-rate is the power of poly")
    elif name == "plateau":
        t.set("schedule.patience-epochs", t["patience-epochs"])
        t.set("schedule.decay", t["decay-rate"])
        t.set("schedule.threshold", 0.0001, "timm's, of torch's ReduceLROnPlateau")
    if warmup and falls:
        t.set("schedule.warmup-prefix", bool(prefix))
    fraction = name == "step" and not float(t["decay-epochs"]).is_integer()
    if warmup and name == "step" and prefix:
        steps_after_warmup(t, warmup, fraction=fraction)
    if name in names and not t["sched-on-updates"] and (warmup or falls or fraction):
        t.set("schedule.per", "epoch", "as timm without --sched-on-updates")

    ignore_unused(t, name, bool(warmup))


def steps_after_warmup(t: Translation, warmup: int, *, fraction: bool) -> None:
    """--sched step with --warmup-prefix counts from the end of the warm-up; step here from the start of the run."""
    if fraction:
        t.lose("warmup-prefix", "A fraction of an epoch is counted from the start of the run.")
        return
    ends = range(warmup + int(t["decay-epochs"]), warmup + t["epochs"], int(t["decay-epochs"]))
    if not ends:  # later than the run
        t.set("schedule.step-epochs", warmup + t["decay-epochs"])
        return
    del t.settings["schedule.step-epochs"]
    t.set("schedule.name", "multistep")
    t.set("schedule.milestones", list(ends), "the steps, from the end of the warm-up on", of="decay-epochs")


def cycles(t: Translation, before: int, cooldown: int) -> None:
    """Cycles of timm's schedules: there --epochs is the first one, here epochs is the whole run.

    `before`: epochs before the first one; `cooldown`: epochs after the last one.
    """
    first, number, factor = t["epochs"], t["lr-cycle-limit"], t["lr-cycle-mul"]
    # As in get_cycle_length of timm's schedules: whole epochs, of which the rest of the last cycle is left out.
    length = first * number if factor == 1 else -first * (factor**number - 1) / (1 - factor)
    total = before + math.floor(length) + cooldown
    t.set("epochs", total, f"{number} cycles, of which the first one has {first} epochs", of="lr-cycle-limit")
    t.set("schedule.cycle-epochs", first, of="lr-cycle-limit")
    t.set("schedule.cycle-mul", factor, of="lr-cycle-mul")
    t.set("schedule.cycle-decay", t["lr-cycle-decay"], of="lr-cycle-decay")
    if cooldown:
        t.set("schedule.cooldown-epochs", rounded(total - before - length))


USED_BY = {  # options of some schedules -> which those are
    "decay-epochs": ("step",),
    "decay-milestones": ("multistep",),
    "decay-rate": ("step", "multistep", "poly", "plateau"),
    "cooldown-epochs": CYCLIC,
    "patience-epochs": ("plateau",),
    "min-lr": (*CYCLIC, "plateau"),
    "lr-k-decay": ("cosine", "poly"),
    "lr-cycle-mul": CYCLIC,
    "lr-cycle-decay": CYCLIC,
    "lr-cycle-limit": CYCLIC,
}


def ignore_unused(t: Translation, name: str, warms_up: bool) -> None:
    """Note the options of other schedules than the one `name`."""
    unused = [option for option, schedules in USED_BY.items() if name not in schedules]
    t.ignore(*unused, because=f"with --sched {name}")
    if name in CYCLIC and t["lr-cycle-limit"] <= 1:
        t.ignore("lr-cycle-mul", "lr-cycle-decay", because="with one cycle")
    if not warms_up:
        t.ignore("warmup-lr", because="without a warm-up")


def milestones(epochs: list[int], on_updates: bool) -> list[int]:
    """Return the epochs after which the rate decays. timm compares its milestones with the next epoch or update."""
    return list(epochs) if on_updates else [epoch - 1 for epoch in epochs if epoch > 1]
