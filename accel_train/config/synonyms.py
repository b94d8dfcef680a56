"""The names of options in other trainers (timm, torchvision, Lightning, Hugging Face), for users who type those.

accel-train does not know these words; `advice` names its own option, or the place where the user can set it.
"""

from __future__ import annotations

from collections.abc import Container

from accel_train.starter import how_to_get

OPTIONS = {  # our option, or the most likely ones -> its names elsewhere, without a group and with "-"
    "optim.lr": "learning-rate base-lr initial-lr lr0 blr",
    "optim.name": "optimizer opt optim optimizer-name",
    "optim.weight-decay": "wd weightdecay l2 l2-reg",
    "optim.momentum": "sgd-momentum opt-momentum",
    "optim.betas": "opt-betas adam-betas beta1 beta2",
    "optim.eps": "epsilon opt-eps adam-epsilon",
    "optim.clip": "clip-grad grad-clip max-grad-norm gradient-clip-val clip-grad-norm gradient-clipping",
    "optim.decay-all": "norm-weight-decay bias-weight-decay",
    "batch-size": "bs batch batchsize b train-batch-size total-batch-size global-batch-size",
    "batch-size micro-batch-size": "per-device-train-batch-size batch-size-per-gpu per-gpu-batch-size",
    "micro-batch-size": "gradient-accumulation-steps accumulate-grad-batches grad-accum-steps accum-iter grad-accum "
    "accumulation-steps accumulation gradient-accumulation update-freq microbatch-size",
    "eval-batch-size": "test-batch-size val-batch-size validation-batch-size vbs per-device-eval-batch-size",
    "epochs": "epoch max-epochs num-epochs n-epochs nepochs num-train-epochs n-epoch total-epochs",
    "seed": "random-seed manual-seed random-state",
    "output-dir": "output out out-dir output-path save-dir savedir save-path log-dir logdir work-dir run-dir "
    "experiment default-root-dir outdir save exp-dir",
    "resume": "resume-from resume-from-checkpoint ckpt checkpoint ckpt-path checkpoint-path load auto-resume "
    "load-checkpoint start-epoch",
    "log-every-updates": "log-interval log-freq print-freq log-every logging-steps log-every-n-steps log-steps",
    "eval-every-epochs": "val-interval eval-interval eval-freq test-interval check-val-every-n-epoch val-freq",
    "trackers": "tracker wandb use-wandb log-wandb report-to tensorboard logger mlflow loggers",
    "config-only": "dry-run print-config",
    "data.name data.root": "data dataset dataset-name data-name train-data csv csv-file csv-path train-csv labels-csv "
    "label-file labels-file annotations annotation-file annotations-file",
    "data.root": "data-dir data-path datadir data-root dataset-dir dataset-path root-dir train-dir traindir "
    "data-folder",
    "data.workers": "num-workers j nworkers n-workers dataloader-num-workers num-data-workers",
    "data.val-fraction": "val-split validation-split val-size val-ratio validation-fraction val-percent val-pct",
    "data.test-fraction": "test-split test-size test-ratio",
    "data.train-limit": "limit-train-batches max-train-samples train-samples subset num-samples",
    "data.test-limit": "limit-val-batches limit-test-batches max-eval-samples",
    "data.sampler": "weighted-sampler weighted-random-sampler weightedrandomsampler balanced-sampler class-balanced "
    "balanced-sampling weighted-sampling oversample oversampling imbalanced-sampler sample-weights",
    "data.placement": "cache-images ram-cache pin-memory pin-mem",
    "data.channels": "in-chans in-channels num-channels grayscale",
    "model.name": "model arch architecture backbone net network model-name model-type",
    "model.pretrained": "weights use-pretrained pretrained-weights finetune fine-tune imagenet-pretrained",
    "model.freeze-body": "freeze freeze-backbone linear-probe freeze-encoder",
    "model.image-size": "img-size imgsz image-size input-size size resolution imsize train-crop-size",
    "model.dropout": "drop drop-rate dropout-rate",
    "model.drop-path": "drop-path-rate stochastic-depth stochastic-depth-prob",
    "model.gradient-checkpointing": "grad-checkpointing activation-checkpointing",
    "model.sync-batchnorm": "sync-bn syncbn sync-batch-norm",
    "schedule.name": "scheduler sched lr-scheduler lr-schedule lr-scheduler-type lr-policy schedule",
    "schedule.warmup-epochs": "warmup lr-warmup-epochs warm-up warmup-steps num-warmup-steps warmup-ratio warmup-iters "
    "warmup-updates",
    "schedule.warmup-lr": "warmup-start-lr",
    "schedule.min-lr": "lr-min eta-min final-lr lr-end",
    "schedule.step-epochs": "step-size lr-step-size decay-epochs lr-step lr-decay-epochs",
    "schedule.decay": "gamma lr-gamma decay-rate lr-decay lr-decay-rate",
    "schedule.milestones": "lr-steps decay-milestones lr-milestones",
    "augment.policy": "aa auto-augment autoaugment randaugment rand-augment trivialaugment augmix augmentation augment",
    "augment.mixup": "mixup-alpha mix-up",
    "augment.cutmix": "cutmix-alpha cut-mix",
    "augment.mix-probability": "mixup-prob cutmix-prob",
    "augment.flip": "hflip horizontal-flip random-flip random-horizontal-flip",
    "augment.vertical-flip": "vflip random-vertical-flip flip-vertical flipud",
    "augment.color-jitter": "colour-jitter jitter colorjitter",
    "augment.color-jitter-probability": "color-jitter-prob",
    "augment.grey": "grayscale-prob random-grayscale",
    "augment.blur": "gaussian-blur-prob gaussian-blur",
    "augment.interpolation": "train-interpolation interp resample",
    "augment.erase": "reprob random-erase random-erasing cutout",
    "augment.crop": "random-crop random-resized-crop rrc",
    "augment.resize": "val-resize-size resize-size",
    "loss.name": "criterion loss-fn loss-function bce bce-loss multi-label multilabel",
    "loss.label-smoothing": "smoothing smooth ls label-smoothing-factor",
    "loss.class-weights": "class-weight weighted-loss",
    "loss.class-weights data.sampler": "balanced balance-classes",
    "ema.enabled": "ema use-ema model-ema",
    "ema.decay": "ema-decay model-ema-decay",
    "checkpoint.every-epochs": "save-every save-freq save-interval checkpoint-freq save-period save-every-n-epochs",
    "checkpoint.every-updates": "save-steps checkpointing-steps checkpoint-every",
    "stop.patience-epochs": "early-stopping early-stop earlystopping early-stopping-patience early-stopping-rounds",
    "stop.patience-epochs schedule.patience-epochs": "patience patience-epochs",
    "stop.hours": "max-time max-hours time-limit max-duration",
    "best-metric": "metric-for-best-model eval-metric monitor best-checkpoint-metric",
    "checkpoint.keep": "save-total-limit checkpoint-hist save-top-k keep-checkpoints",
}
LAUNCHER = {  # option of accelerate launch -> its names elsewhere
    "--mixed_precision fp16": "fp16 half",
    "--mixed_precision bf16": "bf16 amp use-amp mixed-precision precision amp-dtype dtype autocast",
    "--mixed_precision no": "fp32",
    "--num_processes N": "num-processes gpus num-gpus ngpus n-gpus n-gpu nproc nproc-per-node world-size devices "
    "gpus-per-node num-devices",
    "--num_machines N": "num-nodes nodes nnodes n-nodes num-machines",
    "--machine_rank N": "machine-rank node-rank",
    "--main_process_port PORT": "master-port main-process-port dist-url",
    "--dynamo_backend inductor": "compile torch-compile torchcompile dynamo dynamo-backend jit",
    "--gpu_ids 0,1": "gpu-ids gpu-id cuda-visible-devices gpu",
    "--config_file accelerate_configs/cpu.yaml": "cpu use-cpu no-cuda no-gpu",
    "--config_file accelerate_configs/fsdp2.yaml": "fsdp deepspeed",
    "--config_file accelerate_configs/multi_gpu.yaml": "device cuda use-cuda strategy accelerator distributed ddp "
    "dist-backend distributed-backend backend multi-gpu multiprocessing-distributed config-file local-rank rank",
}
ANSWERS = {  # sentence -> names of what it explains
    "To evaluate a run: `accel-train evaluate RUN`.": "eval evaluate eval-only evaluate-only test-only validate test",
    "To classify images: `accel-train predict RUN IMAGE`.": "predict inference",
    "Name the recipe without an option: accel-train train RECIPE.": "config cfg recipe config-name",
    "The number of classes follows from the data.": "num-classes nb-classes n-classes",
}

TABLES = OPTIONS, LAUNCHER, ANSWERS


def _by_word(table: dict[str, str]) -> dict[str, str]:
    return {word: meaning for meaning, words in table.items() for word in words.split()}


def advice(key: str, known: Container[str]) -> str:
    """Return a sentence that helps a user who gives the unknown option `key` ("optim.learning-rate"), or "".

    `known`: the options of this command; no others are proposed.
    """
    word = key.lower().rpartition(".")[2]
    if word in (sentences := _by_word(ANSWERS)) and "epochs" in known:
        return f" {sentences[word]}"
    if word in (options := _by_word(LAUNCHER)) and "data.root" in known:
        return (
            f" Set it on the launch command: accelerate launch {options[word]} …; see accelerate_configs/."
            + how_to_get("accelerate_configs/")
        )
    meant = [name for name in _by_word(OPTIONS).get(word, "").split() if name in known]
    return f" Did you mean {' or '.join(map(repr, meant))}?" if meant else ""
