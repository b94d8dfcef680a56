"""What it costs that a run is the same on any number of processes: updates of one process, in turns.

    python benchmarks/same_run.py [RECIPE OPTION …] [--rounds N]

plain        torch's own BatchNorm over the micro-batch, torch's own dropout, DDP's or no sum: what other trainers do
same run     the default: BatchNorm over virtual batches, dropout by sample
bitwise      --bitwise true: one virtual batch a forward pass, exact sums of the gradients, deterministic kernels

Each round measures one update of each; printed are the median and the quartiles of the ratios of a round.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import chain, islice, repeat

os.environ.setdefault("OMP_NUM_THREADS", "1")  # --bitwise uses one thread for each process

import torch

from accel_train import models
from accel_train.config.options import parse
from accel_train.data.sources.load import splits_of
from accel_train.evaluate import Batch
from accel_train.launch.environment import prepare_environment
from accel_train.training_setup import TrainingSetup, connect, create_training_setup

DEFAULT = "cifar10_resnet18 --data.name synthetic --model.image-size 32 --batch-size 256 --virtual-batch-size 32"


def create_setup(words: list[str]) -> TrainingSetup:
    launch, config = prepare_environment(), parse(words)
    accelerator = connect(config, launch)
    setup = create_training_setup(config, launch, accelerator, splits_of(config))
    models.set_train_mode(setup.model, config.model)
    return setup


def batches(setup: TrainingSetup) -> Iterator[Batch]:
    return chain.from_iterable(setup.training.batches for _ in repeat(None))


def update(setup: TrainingSetup, source: Iterator[Batch], kind: str) -> None:
    step, samples = setup.step, setup.plan.batch_size
    torch.use_deterministic_algorithms(step.exact_gradients is not None)
    micro_batches = islice(source, setup.plan.accumulation)
    if kind != "plain":
        for batch in step.micro_batches(micro_batches, 0, samples):
            inputs, targets = setup.training.transform(batch)
            step.backward(setup.criterion(step.forward(inputs), targets))
        step.apply(1)
        return
    for batch in micro_batches:
        inputs, targets = setup.training.transform(batch)
        losses = setup.criterion(setup.model(inputs), targets)
        (losses.sum() / samples).backward()  # type: ignore[no-untyped-call]
    setup.optimizer.step()
    if step.dropout is not None:
        step.dropout.clear()
    step.discard()


def main() -> None:
    words = sys.argv[1:]
    rounds = 20
    if "--rounds" in words:
        place = words.index("--rounds")
        rounds = int(words[place + 1])
        del words[place : place + 2]
    words = words or DEFAULT.split()
    usual, bitwise = create_setup(words), create_setup([*words, "--bitwise", "true"])
    kinds: dict[str, Callable[[], None]] = {}
    for kind, setup in (("plain", usual), ("same run", usual), ("bitwise", bitwise)):
        source = batches(setup)
        kinds[kind] = lambda setup=setup, source=source, kind=kind: update(setup, source, kind)  # type: ignore[misc]
    for run in (*kinds.values(), *kinds.values()):  # warm-up
        run()
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(rounds):
        for kind in list(kinds) if number % 2 else reversed(list(kinds)):
            began = time.perf_counter()
            kinds[kind]()
            seconds[kind].append(time.perf_counter() - began)
    print(" ".join(words))
    print(f"{rounds} rounds, {torch.get_num_threads()} thread, virtual batches of {usual.plan.virtual_batch}")
    for kind, times in seconds.items():
        ratios = sorted(own / plain for own, plain in zip(times, seconds["plain"], strict=True))
        low, middle, high = statistics.quantiles(ratios, n=4) if rounds > 1 else (ratios[0],) * 3
        text = f"{middle:.2f} ({low:.2f} to {high:.2f})"
        print(f"{kind:<10} {statistics.median(times) * 1e3:8.1f} ms an update, {text} of plain")


if __name__ == "__main__":
    main()
