"""The same run on 1, 2 and 4 real processes (3 for the evaluation) and with 1, 2 and 4 steps of accumulation."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import helpers
import pytest
import torch

from accel_train.keyed import key, permuted

WORKER = helpers.ROOT / "tests" / "feed_worker.py"
WORLDS = (1, 2, 3, 4)
SAMPLES, BATCH = 477, 96  # the last window of an epoch is short, and its last sample has no partner


@pytest.fixture(scope="module")
def feeds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """World size -> each process's batches and evaluation counts; see feed_worker.py."""
    found = {}
    for world in WORLDS:
        folder = tmp_path_factory.mktemp(f"feeds-{world}")
        done = helpers.python(WORKER, folder, processes=world, timeout=250)
        assert done.returncode == 0, done.stdout + done.stderr
        found[world] = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]
    return found


def together(processes: list[dict[str, Any]], case: str) -> list[Any]:
    """Return all samples of an epoch in order: by micro-batch, then by process."""
    steps = zip(*(process["fed"][case] for process in processes), strict=True)
    return list(chain.from_iterable(chain.from_iterable(steps)))


@pytest.mark.slow
class TestFeeds:
    @pytest.mark.parametrize("augment", ["turned", "mixed", "policy", "own"])
    def test_the_same_samples_pixels_and_targets_in_the_same_order(self, feeds: dict, augment: str) -> None:
        cases = [case for case in feeds[1][0]["fed"] if case.startswith(augment) and "from" not in case]
        assert len(cases) == (1 if augment in ("policy", "own") else 3)
        expected = together(feeds[1], cases[0])
        ids = [sample[0] for sample in expected]
        word = key(3, 1, "order")
        window = torch.arange(len(ids)) % SAMPLES
        assert ids == permuted(window, SAMPLES, word).tolist()
        assert sorted(ids[:SAMPLES]) == list(range(SAMPLES))
        assert [sample[1] for sample in expected] == [1.0] * SAMPLES + [0.0] * (len(ids) - SAMPLES)
        assert len({sample[3] for sample in expected[:SAMPLES]}) > 400  # the digests tell images apart
        for world, processes in feeds.items():
            for case in cases:
                assert together(processes, case) == expected, (world, case)

    def test_a_restart_is_fed_the_rest_of_the_epoch(self, feeds: dict) -> None:
        for world, processes in feeds.items():
            whole = together(processes, "mixed, 2")
            assert together(processes, "mixed, 2, from 3") == whole[3 * BATCH :], world


@pytest.mark.slow
def test_evaluation_counts_the_same_on_any_number_of_processes(feeds: dict) -> None:
    expected = feeds[1][0]["counted"]
    for case, figures in expected.items():
        count = SAMPLES if case.startswith("train") else 359
        assert figures["count"] == count == sum(map(sum, figures["confusion"]))
        assert figures["accuracy"] == sum(figures["confusion"][label][label] for label in range(10)) / count
        assert figures["accuracy"] < figures["top5_accuracy"] < 1
    for processes in feeds.values():
        for process in processes:
            for case, figures in expected.items():
                found = process["counted"][case]
                assert {**found, "loss": 0} == {**figures, "loss": 0}
                assert found["loss"] == pytest.approx(figures["loss"], rel=1e-6)
    for split in ("train", "test"):
        confusions = [figures["confusion"] for case, figures in expected.items() if case.startswith(split)]
        assert len(confusions) == 6 and all(other == confusions[0] for other in confusions)  # on any batch and loader


OPTIONS = """
digits --epochs 2 --log-every-updates 1 --batch-size 96 --data.train-limit 1437 --optim.lr 0.1 --augment.flip 0.5
--augment.mixup 0.4 --augment.cutmix 1 --augment.mix-probability 0.5 --loss.label-smoothing 0.1
--loss.class-weights balanced
""".split()  # noqa: SIM905


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return trained(tmp_path_factory.mktemp("alone") / "run", 1, 1)


def trained(run: Path, world: int, accumulation: int, *, launcher: bool = False) -> dict[str, Any]:
    micro_batch = BATCH // world // accumulation
    words = (*OPTIONS, "--micro-batch-size", micro_batch, "--output-dir", run)
    done = helpers.run(*words, processes=world, timeout=250, launcher=launcher)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [line["loss"] for line in helpers.lines_of(run, "train")]
    return {"losses": losses, "result": helpers.result_of(run)}


@pytest.mark.parametrize(
    ("world", "accumulation"),
    [
        (1, 4),
        (4, 2),
        # Two processes are started by the real launcher.
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, 2), (2, 1), (2, 2), (2, 4), (4, 1), (4, 4))),
    ],
)
def test_each_updates_loss_is_the_same(tmp_path: Path, alone: dict, world: int, accumulation: int) -> None:
    found = trained(tmp_path / "run", world, accumulation, launcher=world == 2)
    assert len(alone["losses"]) == 30
    assert alone["losses"][-1] < alone["losses"][0] - 0.2  # it learns
    # Each micro-batch size may have kernels of its own, which round differently; from update to update that grows. On
    # CPUs without AVX-512 it is 4e-5 after 30 updates. A wrong sample or weight would be seen at once.
    assert found["losses"][:10] == pytest.approx(alone["losses"][:10], rel=1e-5)
    assert found["losses"] == pytest.approx(alone["losses"], rel=2e-4)
    assert found["result"]["updates"] == 30 and found["result"]["world_size"] == world
    assert found["result"]["test_images"] == 359
    assert found["result"]["test_loss"] == pytest.approx(alone["result"]["test_loss"], rel=2e-4)
