"""The images of timm's train.py: sizes, crops, colours. What a model expects is asked of the timm installed."""

from __future__ import annotations

from typing import Any

from accel_train.config.declaration import POLICIES
from accel_train.convert.translation import Translation


def augments(t: Translation) -> bool:
    """Whether training images are augmented."""
    return not t["no-aug"]


def preprocessing(t: Translation) -> None:
    """Sizes, crops, interpolation and colours' mean, by the options or by what timm knows of the model."""
    from timm.data import resolve_data_config
    from timm.models import get_pretrained_cfg, is_model

    name = t["model"].removeprefix("timm/")
    expected: dict[str, Any] = {}
    if is_model(name) and (found := get_pretrained_cfg(name)) is not None:
        expected = found.to_dict()
    else:
        t.differs.append(f"timm {name!r} is not a model of the timm installed; sizes and colours are timm's defaults")
    names = ("in-chans", "input-size", "img-size", "interpolation", "mean", "std", "crop-pct")
    config = resolve_data_config({each.replace("-", "_"): t[each] for each in names}, pretrained_cfg=expected)
    channels, height, width = config["input_size"]
    channels = t["in-chans"] or channels  # a model's own size has its usual channels
    if height != width:
        t.lose("input-size", "Images are squares here.")
    if channels != 3:
        t.set("data.channels", channels, of="in-chans")
    if t["input-img-mode"] not in (None, "RGB" if channels == 3 else "L"):
        t.lose("input-img-mode", "Images are RGB here, or grey (L) with data.channels 1.")
    t.set("model.image-size", height, of="img-size")
    t.set("augment.crop-fraction", config["crop_pct"], "timm's --crop-pct", of="crop-pct")
    if config["crop_mode"] != "center":
        t.differs.append(f"evaluation: timm's crop mode of this model is {config['crop_mode']}, here center")
    for key in ("mean", "std"):
        if len(config[key]) == channels:  # else they are those of the model's usual channels
            t.set(f"augment.{key}", list(config[key]))
    interpolation(t, config["interpolation"])
    if t["no-aug"]:
        t.set("augment.crop", "squash", "timm's --no-aug resizes training images to the model's input")
        return
    mode = t["train-crop-mode"] or "rrc"
    t.set("augment.crop", "resized" if mode == "rrc" else mode, of="train-crop-mode")
    t.set("augment.scale", t["scale"], of="scale")
    t.set("augment.ratio", t["ratio"], of="ratio")


def interpolation(t: Translation, in_evaluation: str) -> None:
    """How images are resized. In training timm draws one of two by default, as `random` does here."""
    training = t["train-interpolation"] if augments(t) else in_evaluation
    t.set("augment.interpolation", in_evaluation, of="interpolation")
    if training not in ("", in_evaluation):
        t.set("augment.train-interpolation", training, of="train-interpolation")


def colours(t: Translation) -> None:
    """timm's policies, and colour jitter, which a policy switches off."""
    policy, jitter = t["aa"], t["color-jitter"]
    if t["no-aug"]:
        return
    if policy == "augmix":
        t.set("augment.policy", "augmix-m3", "timm's, with its default strength")
    elif policy in POLICIES:
        t.lose("aa", "This is no policy of timm's.")
    elif policy:
        t.set("augment.policy", policy, of="aa")
    if jitter and (not policy or "3a" in policy):
        t.set("augment.color-jitter", jitter, of="color-jitter")
        if t["color-jitter-prob"] is not None:
            t.set("augment.color-jitter-probability", t["color-jitter-prob"])
    if t["gaussian-blur-prob"]:
        t.set("augment.blur", t["gaussian-blur-prob"])
        t.differs.append("--gaussian-blur-prob: timm's kernel has 23 pixels")
