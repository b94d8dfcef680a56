"""Advice for users who type an option of another trainer (timm, torchvision, ultralytics, Lightning, Hugging Face).

accel-train does not know these words; `advice` names its own option (`Synonyms` in its declaration), or the place where
the user can set it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from accel_train.config.declaration import Synonyms
from accel_train.errors import how_to_get

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
    "--dynamo_mode max-autotune": "torchcompile-mode",
    "--gpu_ids 0,1": "gpu-ids gpu-id cuda-visible-devices gpu",
    "--config_file accelerate_configs/cpu.yaml": "cpu use-cpu no-cuda no-gpu",
    "--config_file accelerate_configs/fsdp2.yaml": "fsdp deepspeed",
    "--config_file accelerate_configs/multi_gpu.yaml": "device cuda use-cuda strategy accelerator distributed ddp "
    "dist-backend distributed-backend multi-gpu multiprocessing-distributed config-file local-rank rank",
}
PRECISION = ("precision", "mixed-precision", "amp-dtype", "dtype")
"""Of the launcher's: they have a value, which says more than the one that is proposed."""
ANSWERS_TEXT = """
To evaluate a run: `accel-train evaluate RUN`.
    eval evaluate eval-only evaluate-only test-only validate test val split save-json
To classify images: `accel-train predict RUN IMAGE`.
    predict inference source save-txt save-conf show
Name the recipe without an option: accel-train train RECIPE.
    config cfg recipe config-name mode task
The number of classes follows from the data.
    num-classes nb-classes n-classes
A run ends after its epochs (a part of one: 0.5), stop.updates or stop.hours, whichever is first.
    min-steps min-epochs train-batches-per-epoch
Set stop.hours and epochs: the run ends at the earlier one.
    time
The seed decides all that is random; see bitwise, too.
    deterministic use-deterministic-algorithms worker-seeding seed-everything
Evaluation is after epochs: set eval-every-epochs, or eval-every-updates.
    val-check-interval eval-strategy evaluation-strategy
All augmentation is off unless the recipe turns it on; training images are then cropped as in evaluation.
    no-aug
Policies are those of torchvision.transforms.v2, or timm's.
    use-v2
Images are resized as tensors, policies change PIL images; a backend of processes is set on the launch command.
    backend
batch-size is that of an update; micro-batch-size is what a process computes at once.
    nbs
Give the whole path of the run: output-dir.
    project exist-ok
Set data.channels: 1 reads images as grey ones.
    input-img-mode
optim.lr is that of the whole batch: give lr * batch-size / base size.
    lr-base lr-base-size lr-base-scale scale-lr auto-scale-lr
Set schedule.warmup-lr: optim.lr times the factor there.
    lr-warmup-decay
Set schedule.name cosine.
    cos-lr
Set schedule.min-lr: optim.lr times this fraction.
    lrf
Set schedule.name one_cycle, schedule.warmup-epochs (their part of the epochs), schedule.warmup-lr and schedule.min-lr.
    pct-start div-factor final-div-factor div final-div
Set model.kwargs, as JSON, if the model has it.
    drop-block bn-momentum bn-eps gp
Set model.weights to the file.
    pretrained-path initial-checkpoint
Set loss.class-weights balanced, data.sampler balanced, or loss.own-class-weights.
    cls-pw
Set augment.color-jitter: brightness contrast saturation hue.
    hsv-h hsv-s hsv-v
BatchNorm is the same on all processes in any case; its batch is virtual-batch-size.
    dist-bn
Write the data into one file with `accel-train cache-data`.
    cache-dataset cache
The fastest memory format of the device is chosen by itself.
    channels-last
Data is loaded ahead, and augmented on the device, by itself.
    no-prefetcher use-multi-epochs-loader prefetch-factor persistent-workers
Data sets that can be downloaded are, into data.root.
    dataset-download download
Not supported: the EMA is on the model's device; on the CPU each update would wait for a copy of all weights.
    model-ema-force-cpu
To begin with the weights of a run alone: --model.weights RUN.
    no-resume-opt
Set checkpoint.every-updates or checkpoint.every-seconds.
    recovery-interval
A resumed run goes on in its own W&B run; W&B's variables WANDB_PROJECT and WANDB_TAGS count.
    wandb-project wandb-tags wandb-resume-id
`accel-train export RUN` writes the model for other programs.
    format opset dynamic simplify workspace quantize optimize
`accel-train bench RECIPE` measures the speed.
    profile profiler
`accel-train report RUN` writes a page with curves, tables and the worst images.
    plots visualize
`accel-train preview RECIPE` writes a picture of training images as the model will see them.
    save-images
With a GPU, memory from which it copies is always pinned.
    pin-mem pin-memory
DDP never broadcasts buffers here: all processes have the same.
    no-ddp-bb
Accelerate imports the modules of the devices that it knows, such as torch_npu.
    device-modules
The number of samples follows from the data; data.train-limit and data.test-limit use a part of it.
    fraction overfit-batches fast-dev-run train-num-samples val-num-samples
`accel-train predict RUN IMAGE --embeddings FILE.npy` writes what is before the last layer, or in --layer.
    embed
Not supported: sizes drawn within an epoch. Sizes that grow from epoch to epoch: model.progressive-sizes.
    train-img-sizes train-batch-sizes train-size-probs train-size-schedule train-size-schedule-spread
    train-size-random-mix variable-batch-loss-scale multi-scale
Not supported: images are squares of one size (NaFlex, rectangles).
    naflex-loader naflex-train-seq-lens naflex-max-seq-len naflex-patch-sizes naflex-patch-size-probs
    naflex-loss-scale naflex-patchify-channels-first rect
Not supported: a model learns from labels, not from a teacher; a loss of your own (loss.name) gets no images.
    kd-model-name kd-distill-type kd-loss-type distill-loss-weight task-loss-weight kd-temperature
    kd-student-feature-dim kd-teacher-feature-dim kd-token-distill-type distill-model dis
Not supported: the learning rate has no noise, nor has it in timm's recipes since 2021 (A1, A2, A3).
    lr-noise lr-noise-pct lr-noise-std
Multiply epochs. For several copies of an image in one batch: data.repeats.
    epoch-repeats
Not supported: one view of each image, and no loss between views.
    aug-splits resplit jsd-loss split-bn
Not supported; augment.mixup and augment.cutmix mix images.
    mosaic close-mosaic bgr copy-paste copy-paste-mode
Each image is evaluated once; docs/evaluate.md has the mean over views of an image in eight lines.
    tta test-time-augmentation test-time-augment
Set model.freeze to the layers that would have a smaller part of the learning rate.
    layer-decay-no-opt-scale
Not supported: weights are float32; for computations in bf16: accelerate launch --mixed_precision bf16.
    model-dtype
Not supported: code that comes with a data set is never run.
    dataset-trust-remote-code trust-remote-code
Not supported: torch.compile has taken TorchScript's place: accelerate launch --dynamo_backend inductor.
    torchscript fuser
Not supported: autocast decides in which precision a norm is computed, on the launch command (--mixed_precision).
    fast-norm
Not supported: to wait for the GPU after each update takes time and changes no result.
    synchronize-step
Not supported: this trainer is for classification.
    overlap-mask mask-ratio retina-masks iou max-det nms agnostic-nms box cls dfl pose kobj rle angle dlog dgrad
    dlam line-width save-crop save-frames show-labels show-conf show-boxes vid-stride stream-buffer dnn
Not supported: a classifier with one class has nothing to learn; some of the classes: data.only-classes.
    single-cls
Console lines: log-every-updates.
    verbose
Set --threshold of `accel-train predict`.
    conf
"""
"""Sentences, and under each the names of what it explains: all options of timm's train.py, torchvision's train.py and
ultralytics' default.yaml that no `Synonyms` has (convert/peers.txt)."""


def _sentences(text: str) -> dict[str, str]:
    table: dict[str, str] = {}
    sentence = ""
    for line in text.strip().splitlines():
        if not line.startswith(" "):
            sentence = line
        table[sentence] = table.get(sentence, "") + line * line.startswith(" ")
    return table


ANSWERS = _sentences(ANSWERS_TEXT)  # sentence -> names of what it explains


def _by_word(table: dict[str, str]) -> dict[str, str]:
    return {word: meaning for meaning, words in table.items() for word in words.split()}


def advice(key: str, known: Container[str], synonyms: Iterable[tuple[str, Synonyms]]) -> str:
    """Return a sentence that helps a user who gives the unknown option `key` ("optim.learning-rate"), or "".

    `known`: the options of this command; no others are proposed. `synonyms`: of all options, by key.
    """
    word = key.lower().rpartition(".")[2]
    if word in (sentences := _by_word(ANSWERS)) and "epochs" in known:
        return f" {sentences[word]}"
    if word in (options := _by_word(LAUNCHER)) and "data.root" in known:
        return (
            f" Set it on the launch command: accelerate launch {options[word]} …; see accelerate_configs/."
            + " (bf16, fp16 or no.)" * (word in PRECISION)
            + how_to_get("accelerate_configs/")
        )
    meaning = ((key, each) for key, each in synonyms if word in each.words.split())
    meant = [name for key, each in meaning for name in (key, each.beside) if name in known]
    return f" Did you mean {' or '.join(map(repr, meant))}?" if meant else ""
