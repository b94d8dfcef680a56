"""timm's train.py: what its options are here. Read in 1.0.29.dev0."""

from __future__ import annotations

import ast
from typing import Any

from accel_train.convert.common import mix_whole_batches, set_batch, set_compilation
from accel_train.convert.timm_images import augments, colours, preprocessing
from accel_train.convert.timm_schedule import learning_rate, schedule
from accel_train.convert.translation import To, Translation


def mixes(t: Translation) -> bool:
    """Whether images are mixed."""
    return bool(max(t["mixup"], t["cutmix"]) > 0 or t["cutmix-minmax"] is not None)


def mixes_both(t: Translation) -> bool:
    """Whether images are mixed by mixup and by cutmix."""
    return bool(t["mixup"] > 0 and (t["cutmix"] > 0 or t["cutmix-minmax"] is not None))


def erases(t: Translation) -> bool:
    """Whether parts of images are erased."""
    return augments(t) and bool(t["reprob"] > 0)


def bce(t: Translation) -> bool:
    """Whether the loss is the binary one: timm takes cross entropy for targets that are neither mixed nor smoothed."""
    return bool(t["bce-loss"]) and (mixes(t) or t["smoothing"] > 0)


def hub_table(t: Translation) -> bool:
    """Whether the data has columns: timm also calls the parts of a WebDataset sample so."""
    return str(t["dataset"]).startswith(("hfds/", "hfids/"))


TABLE: dict[str, str | To] = {
    "seed": "seed",
    "input-key": To("data.image-column", when=hub_table),
    "target-key": To("data.label-column", when=hub_table),
    "pretrained": To("model.pretrained", fine=(False,)),
    "initial-checkpoint": "model.weights",
    "pretrained-path": "model.weights",
    "drop": To("model.dropout", fine=(0.0,)),
    "drop-connect": To("model.drop-path", when=lambda t: t["drop-path"] is None),
    "drop-path": "model.drop-path",
    "head-init-scale": "model.head-init-scale",
    "head-init-bias": "model.head-init-bias",
    "grad-checkpointing": To("model.gradient-checkpointing", fine=(False,)),
    "sync-bn": To("model.sync-batchnorm", fine=(False,), when=lambda t: t.processes > 1),
    "opt": "optim.name",
    "opt-eps": "optim.eps",
    "opt-betas": "optim.betas",
    "momentum": "optim.momentum",
    "weight-decay": "optim.weight-decay",
    "layer-decay": "optim.layer-decay",
    "layer-decay-min-scale": To("optim.layer-decay-min-scale", fine=(0,), when=lambda t: t["layer-decay"] is not None),
    "clip-grad": "optim.clip",
    "clip-mode": To("optim.clip-mode", when=lambda t: t["clip-grad"] is not None),
    "hflip": To("augment.flip", when=augments),
    "vflip": To("augment.vertical-flip", fine=(0.0,), when=augments),
    "grayscale-prob": To("augment.grey", when=augments),
    "reprob": To("augment.erase", fine=(0.0,), when=augments),
    "remode": To("augment.erase-mode", when=erases),
    "recount": To("augment.erase-count", fine=(0, 1), when=erases),
    "mixup": To("augment.mixup", fine=(0.0,)),
    "cutmix": To("augment.cutmix", fine=(0.0,)),
    "cutmix-minmax": "augment.cutmix-minmax",
    "mixup-prob": To("augment.mix-probability", when=mixes),
    "mixup-switch-prob": To("augment.switch-probability", when=mixes_both),
    "mixup-off-epoch": To("augment.mix-epochs", fine=(0,), when=mixes),
    "smoothing": "loss.label-smoothing",
    "bce-loss": To("loss.name", {True: "binary_cross_entropy"}, fine=(False,), when=bce),
    "bce-sum": To("loss.bce-sum", fine=(False,), when=bce),
    "bce-target-thresh": To("loss.bce-target-threshold", when=bce),
    "bce-pos-weight": To("loss.bce-pos-weight", when=bce),
    "model-ema": To("ema.enabled", fine=(False,)),
    "model-ema-decay": To("ema.decay", when=lambda t: t["model-ema"]),
    "model-ema-warmup": To("ema.warmup", fine=(False,), when=lambda t: t["model-ema"]),
}
MEASURED: dict[str, str | To] = {
    "checkpoint-hist": "checkpoint.keep",
    "val-interval": "eval-every-epochs",
    "log-interval": "log-every-updates",
    "workers": "data.workers",
}

HARMLESS = """
config dataset-download channels-last fuser fast-norm torchscript device no-ddp-bb
synchronize-step local-rank device-modules worker-seeding recovery-interval save-images pin-mem
no-prefetcher output experiment tta use-multi-epochs-loader log-wandb wandb-project wandb-tags wandb-resume-id resume
validation-batch-size num-classes dist-bn model-ema-force-cpu naflex-max-seq-len lr-noise-pct
lr-noise-std kd-distill-type kd-loss-type kd-temperature warmup-prefix eval-metric amp-impl
aot-autograd num-gpu train-num-samples val-num-samples
""".split()  # noqa: SIM905
"""Those that change what is learned only with another option, which is lost, are among them."""


def translate(t: Translation) -> None:
    """Write the recipe of a command of timm's train.py."""
    model(t)
    data(t)
    beginning(t)
    set_batch(t, t["batch-size"], max(t["grad-accum-steps"], 1))
    t.apply(TABLE)
    t.apply(MEASURED, only_given=True)
    if given := keywords(t["opt-kwargs"]):
        t.set("optim.kwargs", given, of="opt-kwargs")
    learning_rate(t)
    schedule(t)
    preprocessing(t)
    colours(t)
    mixing(t)
    repeats(t)
    if t["bce-loss"] and not bce(t):
        t.differs.append("--bce-loss: timm takes cross entropy where targets are neither mixed nor smoothed")
    if t["amp"] or t["native-amp"] or t["apex-amp"]:
        t.launch.append("--mixed_precision " + ("bf16" if t["amp-dtype"] == "bfloat16" else "fp16"))
    set_compilation(t, t["torchcompile"], t["torchcompile-mode"])
    t.finish(HARMLESS)


def mixing(t: Translation) -> None:
    """How images are mixed, and that some are erased before or after it."""
    if erases(t):
        t.differs.append("--reprob: timm erases up to 1/3 of an image, here up to 0.33")
    if not mixes(t):
        t.ignore("mixup-mode", "mixup-prob", "mixup-switch-prob", "mixup-off-epoch", because="without mixup and cutmix")
        return
    if t["mixup-mode"] == "batch":
        mix_whole_batches(t, "mixup-mode")
    else:
        t.set("augment.mix-mode", t["mixup-mode"], of="mixup-mode")
    if t["no-prefetcher"]:
        return
    if erases(t):
        t.lose("reprob", "timm's prefetcher erases in the mixed images, here images are mixed that have been erased.")
    if t["mixup-off-epoch"]:
        t.differs.append(
            "--mixup-off-epoch: timm's data workers do not hear of it and mix until the end, unless --no-prefetcher is "
            "given; to do so here, too, remove augment.mix-epochs"
        )


def repeats(t: Translation) -> None:
    """Repeated augmentation, which timm has on several processes."""
    if (number := t["aug-repeats"]) == 0:
        return
    if t.processes == 1:
        t.lose("aug-repeats", "timm refuses it on one process.")
    elif not float(number).is_integer():
        t.lose("aug-repeats", "Here each sample is repeated equally often: a whole number.")
    else:
        t.set("data.repeats", int(number), of="aug-repeats")


def model(t: Translation) -> None:
    """The model, and what is given to its function: options that have no key of their own here."""
    t.set("model.name", t["model"], of="model")
    given = {"global_pool": t["gp"], "bn_momentum": t["bn-momentum"], "bn_eps": t["bn-eps"]}
    given |= {"drop_block_rate": t["drop-block"]}
    given |= keywords(t["model-kwargs"])
    if kwargs := {name: value for name, value in given.items() if value is not None}:
        t.set("model.kwargs", kwargs, of="model-kwargs")


def beginning(t: Translation) -> None:
    """Where the training begins: --resume with --no-resume-opt reads the weights of a checkpoint, and its epoch."""
    epoch = t["start-epoch"]
    if t["no-resume-opt"] and t["resume"]:
        t.set("model.weights", t["resume"], "the weights alone, as --no-resume-opt", of="resume")
        if epoch is None:
            t.lose("no-resume-opt", "timm goes on with the checkpoint's next epoch; such a run begins with the first.")
    if epoch:
        t.lose("start-epoch", "A run that goes on knows its epoch, and a new one begins with the first.")


def keywords(words: Any) -> dict[str, Any]:
    """Return NAME=VALUE … as timm reads them: a value is one of Python's if it can be, else text."""
    if isinstance(words, dict):
        return words
    result: dict[str, Any] = {}
    for word in words:
        name, _, text = word.partition("=")
        try:
            result[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            result[name] = text
    return result


def data(t: Translation) -> None:
    """The data set, its folder and its splits."""
    name, root = t["dataset"], t["data-dir"] or t["data"]
    t.set("data.name", "folder" if name in ("", "folder", "ImageFolder") else name, of="dataset")
    if root:
        t.set("data.root", root)
    named = t.settings["data.name"].value.partition("/")[0] in ("folder", "hfds", "hfids", "tfds")
    for split, usual in (("train-split", ("train", "training")), ("val-split", ("validation", "val", "valid"))):
        if t.is_given(split) and t[split] not in usual:
            if named:
                t.set(f"data.{split}", t[split], of=split)
            else:
                t.lose(split, "Shards have the usual names of splits here, and torchvision's sets theirs.")
    if str(t["class-map"]).endswith(".pkl"):
        t.lose("class-map", "Write the names of the classes into a text file, in their order, one a line.")
    elif t["class-map"]:
        t.set("data.class-map", t["class-map"])
    # timm leaves out the last images of an epoch that fill no batch; with accumulation it makes a smaller update.
    t.set("data.drop-last", max(t["grad-accum-steps"], 1) == 1, "as timm's loader")
