"""Datasets in memory: the same batches as when images are fetched one by one, wherever the pixels are kept."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel_train.config.schema import Augment, Config, Data
from accel_train.data import loading, memory
from accel_train.data.loading import InputPipeline, create_input_pipeline
from accel_train.data.memory import MemoryLoader, choose_place
from accel_train.data.order import EvaluationSampler, Plan, TrainingSampler
from accel_train.data.sources.arrays import ArraySource
from accel_train.data.sources.load import load_splits
from accel_train.data.sources.splits import Splits, subset
from accel_train.launch.accelerator import create_accelerator
from accel_train.launch.environment import Launch

GENERATOR = torch.Generator().manual_seed(0)
PIXELS = torch.randint(256, (157, 3, 12, 12), generator=GENERATOR, dtype=torch.uint8)
ARRAYS = ArraySource("colours", PIXELS, torch.arange(157) % 4)
SPLITS = Splits(tuple("abcd"), 3, 12, (0.4, 0.5, 0.6), (0.2, 0.3, 0.25), ARRAYS, None, ARRAYS)
TURNED = Augment(crop="random", pad=2, flip=0.5, erase=0.3)
MIXED = dataclasses.replace(TURNED, mixup=0.4, cutmix=1.0)
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def feed_of(
    splits: Splits = SPLITS, *, training: bool = True, layout: str = "contiguous", **settings: Any
) -> InputPipeline:
    settings = {"augment": TURNED, "batch_size": 24, **settings}
    config = Config(seed=5, **settings)
    source = splits.train
    order = TrainingSampler(Plan(len(source), 24, 1, 2), 5) if training else EvaluationSampler(len(source), 50)
    accelerator = create_accelerator(Launch())
    options: dict[str, Any] = {"training": training, "size": 10, "memory_format": LAYOUTS[layout]}
    return create_input_pipeline(config, splits, source, order, accelerator, **options)


def seen(feed: InputPipeline) -> list[dict[str, torch.Tensor]]:
    batches = []
    for batch in feed.batches:
        inputs, targets = feed.transform(batch)
        batches.append({**batch, "inputs": inputs, "targets": targets})
    return batches


def same(found: list[dict[str, torch.Tensor]], expected: list[dict[str, torch.Tensor]]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(torch.as_tensor(one[name]), torch.as_tensor(other[name])) for name in one)


PART = dataclasses.replace(SPLITS, train=subset(ARRAYS, (torch.arange(157) % 3 != 0).numpy()))


@pytest.mark.parametrize(
    "settings",
    [
        {"augment": TURNED}, {"augment": MIXED}, {"augment": Augment(flip=0.5)}, {"augment": Augment(resize=14)},
        {"training": False}, {"splits": PART},
    ],
    ids=["turned", "mixed", "flipped", "resized", "evaluation", "a part of a set"],
)  # fmt: skip
@pytest.mark.parametrize("layout", LAYOUTS)
def test_host_memory_gives_the_batches_of_the_loader(
    settings: dict[str, Any], layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(loading, "choose_place", lambda *_, **__: "disk")
        expected = seen(feed_of(**settings))
    feed = feed_of(**settings, layout=layout)
    assert isinstance(feed.loader, MemoryLoader) and feed.placement.startswith("in host memory, 0 workers, ")
    found = seen(feed)
    same(found, expected)
    for batch in found:
        source = settings.get("splits", SPLITS).train
        assert torch.equal(batch["labels"], source.labels[batch["ids"]])
    assert all(batch["inputs"].is_contiguous(memory_format=LAYOUTS[layout]) for batch in found)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_process_takes_its_slice_from_any_update_on(layout: str) -> None:
    def batches(process: int, processes: int, update: int) -> list[dict[str, torch.Tensor]]:
        order = TrainingSampler(Plan(157, 24, processes, 2), 5)
        order.seek(3, update * 24)
        cpu = torch.device("cpu")
        accelerator: Any = SimpleNamespace(process_index=process, num_processes=processes, device=cpu)
        return list(MemoryLoader(ARRAYS, order, accelerator, seed=5, pixels_device=cpu, memory_format=LAYOUTS[layout]))

    whole = batches(0, 1, 0)
    assert len(whole) == 14
    for processes in (2, 3):
        parts = [batches(process, processes, 0) for process in range(processes)]
        joined = [
            {name: torch.cat([torch.as_tensor(part[name]) for part in step]) for name in step[0]}
            for step in zip(*parts)  # noqa: B905
        ]
        same(joined, whole)
    same(batches(0, 1, 4), whole[8:])


def test_synthetic_images_are_laid_out_or_made_when_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    data = Data(name="synthetic", train_limit=157)
    splits = load_splits(data, 0, size=12)
    found = feed_of(splits)
    monkeypatch.setattr(memory, "free_host_bytes", lambda: 0)
    expected = feed_of(splits)
    assert isinstance(found.loader, MemoryLoader) and not isinstance(expected.loader, MemoryLoader)
    same(seen(found), seen(expected))


class TestPlacement:
    """Return the chosen place, for devices that this machine does not have."""

    @staticmethod
    def place(
        monkeypatch: pytest.MonkeyPatch,
        device: str,
        free: int = 10**9,
        host: int = 10**9,
        **options: Any,
    ) -> str:
        monkeypatch.setattr(memory, "free_device_bytes", lambda _: free)
        monkeypatch.setattr(memory, "free_host_bytes", lambda: host)
        accelerator = SimpleNamespace(device=torch.device(device), num_processes=1)
        settings = {"per_image": False, "source": ARRAYS, **options}
        return choose_place(accelerator=accelerator, **settings)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("device", "free", "found"),
        [
            ("cpu", 0, "host"),
            ("cuda", 4 * PIXELS.numel(), "device"),
            ("cuda", 4 * PIXELS.numel() - 1, "host"),
            ("xpu", 10**9, "device"),
        ],
    )
    def test_where(self, monkeypatch: pytest.MonkeyPatch, device: str, free: int, found: str) -> None:
        assert self.place(monkeypatch, device, free) == found

    def test_what_does_not_fit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        source = load_splits(Data(name="synthetic"), 0).train
        needed = 2048 * 3 * 32 * 32
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
        fits: dict[str, Any] = {"source": source}
        assert self.place(monkeypatch, "cpu", host=6 * needed, **fits) == "host"
        assert self.place(monkeypatch, "cpu", host=6 * needed - 6, **fits) == "disk"

    def test_one_process_without_room_decides_for_all(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("free_device_bytes", "free_host_bytes"):
            monkeypatch.setattr(memory, name, lambda *_: 10**9)
        others = torch.tensor([False])
        accelerator = SimpleNamespace(
            device=torch.device("cpu"), num_processes=2, gather=lambda own: torch.cat([own, others])
        )
        assert not memory.all_agree(accelerator, True)  # type: ignore[arg-type]
        others = torch.tensor([True])
        assert memory.all_agree(accelerator, True)  # type: ignore[arg-type]
        assert not memory.all_agree(accelerator, False)  # type: ignore[arg-type]

    def test_a_policy_needs_the_host(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.place(monkeypatch, "cuda", per_image=True) == "host"


@pytest.mark.slow
def test_an_interpreter_ends_although_a_loader_with_workers_is_still_there() -> None:
    script = (
        "import torch\n"
        "from loaders import loader_of\n"
        "from accel_train.config.schema import Augment, Data\n"
        "from accel_train.data.order import Plan, TrainingSampler\n"
        "from accel_train.data.sources.load import load_splits\n"
        "source = load_splits(Data(), 0).train\n"
        "order = TrainingSampler(Plan(len(source), 32, 1, 1), 0)\n"
        "loader = loader_of(source, order, Augment(policy='trivialaugment'), workers=2)\n"
        "batches = iter(loader)\n"
        "next(batches)\n"
        "import builtins; builtins.kept = batches  # outlives this module\n"
        "print('done', flush=True)\n"
    )
    command, tests = [sys.executable, "-c", script], Path(__file__).parents[1]
    done = subprocess.run(command, cwd=tests, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr
