"""What a user of another trainer may type, and the option here; docs/coming_from.md has more.

Only words that mean one thing everywhere: a wrong neighbour is worse than none.
"""

from __future__ import annotations

from collections.abc import Container

from accel_train.errors import how_to_get

OPTIONS = {
    "optim.lr": "learning-rate base-lr initial-lr lr0",
    "optim.name": "optimizer opt optim",
    "optim.weight-decay": "wd weightdecay",
    "optim.clip": "grad-clip clip-grad clip-grad-norm gradient-clip-val max-grad-norm",
    "batch-size": "bs batch train-batch-size",
    "micro-batch-size": "gradient-accumulation-steps accumulate-grad-batches per-device-train-batch-size",
    "epochs": "max-epochs num-epochs num-train-epochs",
    "stop.updates": "max-steps max-updates",
    "stop.patience-epochs": "early-stopping patience",
    "schedule.name": "scheduler lr-scheduler sched lr-scheduler-type",
    "schedule.warmup-epochs": "warmup lr-warmup-epochs",
    "model.name": "model arch architecture",
    "model.image-size": "img-size imgsz input-size train-crop-size",
    "model.pretrained": "finetune",
    "data.root": "data-dir data-path datadir",
    "data.name": "dataset dataset-name",
    "data.workers": "num-workers nworkers dataloader-num-workers",
    "augment.policy": "aa auto-augment",
    "augment.crop-fraction": "crop-pct",
    "augment.flip": "hflip fliplr",
    "augment.vertical-flip": "vflip flipud",
    "augment.erase": "reprob random-erase",
    "loss.label-smoothing": "smoothing",
    "output-dir": "output save-dir out-dir log-dir work-dir default-root-dir",
    "log-every-updates": "log-interval print-freq logging-steps log-every-n-steps",
    "trackers": "logger report-to log-wandb",
    "bitwise": "deterministic use-deterministic-algorithms",
}
"""Option here -> its names elsewhere."""
LAUNCH = {
    "--mixed_precision bf16": "amp bf16 precision mixed-precision amp-dtype",
    "--mixed_precision fp16": "fp16 half",
    "--num_processes N": "gpus num-gpus n-gpus nproc-per-node world-size devices",
    "--num_machines N": "nodes num-nodes nnodes",
    "--dynamo_backend inductor": "compile torchcompile",
    "--config_file accelerate_configs/fsdp2.yaml": "fsdp deepspeed",
    "--config_file accelerate_configs/multi_gpu.yaml": "device strategy accelerator ddp distributed local-rank",
}
"""Option of accelerate launch -> its names elsewhere."""


def advice(key: str, known: Container[str]) -> str:
    """Return a sentence that helps a user who gives the unknown option `key` ("optim.learning-rate"), or "".

    `known`: the options of this command; no others are proposed.
    """
    word = key.lower().rpartition(".")[2]
    for option, names in LAUNCH.items():
        if word in names.split() and "data.root" in known:
            where = f"accelerate launch {option} …; see accelerate_configs/."
            return f" Set it on the launch command: {where}{how_to_get('accelerate_configs/')}"
    meant = next((option for option, names in OPTIONS.items() if word in names.split()), "")
    return f" Did you mean {meant!r}?" if meant in known else ""
