"""Write each process's training batches and evaluation counts: `… tests/feed_worker.py FOLDER`, under any launcher.

It creates the input pipelines as the trainer does. FOLDER/RANK.json of each process:
    fed       case -> a list of its micro-batches, each a list of [sample, weight, target, digest of its pixels]
    counted   split, samples a step -> the figures of a fixed model
"""

import dataclasses
import hashlib
import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator

from accel_train import models
from accel_train.config.schema import Augment, Config, Data, Model
from accel_train.data.loading import create_input_pipeline, create_loader
from accel_train.data.order import EvaluationSampler, Plan, TrainingSampler
from accel_train.data.sources.load import load_splits
from accel_train.evaluate import evaluate
from accel_train.launch.accelerator import create_accelerator
from accel_train.launch.environment import prepare_environment
from accel_train.records.metrics import Evaluation

TURNED = Augment(crop="random", pad=1, flip=0.5, vertical_flip=0.5, erase=0.25)
AUGMENTS = {
    "turned": TURNED,
    "mixed": dataclasses.replace(TURNED, mixup=0.4, cutmix=1.0),
    "policy": dataclasses.replace(TURNED, policy="augmix"),
    "own": dataclasses.replace(TURNED, own=f"{Path(__file__).with_name('own_augment.py')}:augment"),
}
CONFIG = Config(seed=3, batch_size=96, data=Data(train_limit=477), model=Model(name="digits_cnn"))
STEPS = (1, 2, 4)  # of accumulation


def fed(accelerator: Accelerator, augment: Augment, accumulation: int, epoch: int, update: int) -> list[list[object]]:
    # One image at a time may be changed in workers or not. Starting them takes seconds, so only small worlds have them.
    has_worker = augment.each_image and accelerator.num_processes <= 2
    data = dataclasses.replace(CONFIG.data, workers=int(has_worker))
    config = dataclasses.replace(CONFIG, augment=augment, data=data)
    splits = load_splits(config.data, config.seed)
    plan = Plan(len(splits.train), config.batch_size, accelerator.num_processes, accumulation)
    order = TrainingSampler(plan, config.seed)
    feed = create_input_pipeline(config, splits, splits.train, order, accelerator, training=True, size=8)
    order.seek(epoch, update * plan.batch_size)
    seen = []
    for batch in feed.batches:
        images, targets = feed.transform(batch)
        digests = [hashlib.sha256(image.contiguous().numpy().tobytes()).hexdigest()[:16] for image in images]
        parts = (batch["ids"].tolist(), batch["weights"].tolist(), targets.tolist(), digests)
        seen.append([list(sample) for sample in zip(*parts, strict=True)])
    return seen  # type: ignore[return-value]


def counted(result: Evaluation) -> dict[str, object]:
    return {**result.metrics, "count": result.count, "confusion": result.confusion}


def main() -> None:
    launch = prepare_environment()
    accelerator = create_accelerator(launch)
    found: dict[str, dict[str, object]] = {"fed": {}, "counted": {}}
    for accumulation in STEPS:
        for name, augment in AUGMENTS.items():
            if not augment.each_image or accumulation == 2:
                found["fed"][f"{name}, {accumulation}"] = fed(accelerator, augment, accumulation, epoch=1, update=0)
    found["fed"]["mixed, 2, from 3"] = fed(accelerator, AUGMENTS["mixed"], 2, epoch=1, update=3)

    splits = load_splits(CONFIG.data, CONFIG.seed)
    torch.manual_seed(0)
    model = models.create_model(CONFIG.model, num_classes=10, channels=1, image_size=8)
    # A set in memory has a loader of its own; the second loader is one that Accelerate prepared.
    for name, source in (("train", splits.train), ("test", splits.test)):
        assert source is not None
        for at_once in (12, 60, 600):
            order = EvaluationSampler(len(source), at_once)
            feed = create_input_pipeline(CONFIG, splits, source, order, accelerator, training=False, size=8)
            found["counted"][f"{name}, {at_once}"] = counted(evaluate(accelerator, model, feed))
            loader = create_loader(source, order, feed.transform, seed=3, workers=0, device=accelerator.device)
            feed = dataclasses.replace(feed, loader=accelerator.prepare_data_loader(loader))
            found["counted"][f"{name}, {at_once}, prepared"] = counted(evaluate(accelerator, model, feed))
    Path(sys.argv[1], f"{launch.rank}.json").write_text(json.dumps(found))
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
