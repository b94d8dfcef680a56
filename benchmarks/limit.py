"""Measure the device's limit: a bare loop of forward, backward and step on tensors that are already on the device.

python benchmarks/limit.py mnist_cnn
"""

from __future__ import annotations

from accel_train.launch.environment import prepare_environment

LAUNCH = prepare_environment()  # before torch is imported, which reads some of it

import tasks  # noqa: E402
from trainer import data_words  # noqa: E402

from accel_train.config.options import parse  # noqa: E402
from accel_train.data.sources.load import splits_of  # noqa: E402
from accel_train.tools.bench import Workload  # noqa: E402


def main() -> None:
    options, task = tasks.parse(tasks.arguments(__doc__ or "", tests=False))
    words = ["--batch-size", str(task.batch_size), *data_words(options.task, options.data_root)]
    config = parse([options.task, *words])
    workload = Workload(config, LAUNCH, splits_of(config))
    progress = tasks.Progress(task, options.every)
    while options.updates is None or progress.update < options.updates:
        workload.bare_seconds(options.every, warm_up=0)
        progress.advance(options.every)


if __name__ == "__main__":
    main()
