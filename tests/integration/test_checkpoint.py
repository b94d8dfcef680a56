"""Checkpoints: the same state on any number of processes, and complete after kills."""

import json
from pathlib import Path

import checkpoint_worker
import helpers
import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from accel_train.checkpoint.directory import find_newest_checkpoint

WORKER = Path(checkpoint_worker.__file__)


def launch(processes: int, steps: list[dict], folder: Path, *words: str) -> None:
    """Do the `steps` with so many real processes (see checkpoint_worker.py); one: this one, which saves time."""
    if processes == 1:
        AcceleratorState._reset_state(reset_partial_state=True)
        checkpoint_worker.run(steps)
        return
    file = folder / f"steps-{processes}{''.join(words)}.json"
    file.write_text(json.dumps(steps))
    done = helpers.python(WORKER, file, *words, processes=processes)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def elastic(tmp_path_factory):
    """Save a run on 1, 2 and 2 (FSDP2) processes, and restore each on 1, 2, 2 (FSDP2) and 4, into FILE.RANK."""
    folder = tmp_path_factory.mktemp("elastic")
    for run in ("one", "two", "fsdp"):
        (folder / run).mkdir()

    def save(run: str) -> dict:
        return {"save": f"{folder / run}/checkpoints", "updates": 3, "dump": f"{folder}/{run}"}

    def restore(by: str, *runs: str) -> list[dict]:
        return [
            {"restore": f"{folder / run}/checkpoints", "resume": "must", "dump": f"{folder}/{run}-{by}"} for run in runs
        ]

    refused = {"restore": f"{folder}/none/checkpoints", "resume": "must", "dump": f"{folder}/refused"}
    launch(1, [save("one")], folder)
    launch(2, [save("fsdp"), *restore("fsdp", "fsdp", "one")], folder, "fsdp")
    launch(2, [save("two"), refused, *restore("two", "one", "fsdp")], folder)
    launch(4, restore("four", "one", "two", "fsdp"), folder)
    launch(1, restore("one", "two", "fsdp"), folder)
    return folder


CASES = [
    ("one", "two", 2), ("one", "fsdp", 2), ("one", "four", 4), ("two", "one", 1), ("two", "four", 4),
    ("fsdp", "one", 1), ("fsdp", "two", 2), ("fsdp", "fsdp", 2), ("fsdp", "four", 4),
]  # fmt: skip


@pytest.mark.ci
@pytest.mark.parametrize(("saved", "restored", "processes"), CASES)
def test_any_number_of_processes_restores_the_state_bitwise(elastic, saved, restored, processes):
    expected = torch.load(elastic / f"{saved}.0")
    assert expected["optimizer"]["state"]["3.weight"]["exp_avg"].abs().sum() > 0
    assert expected["model"]["1.num_batches_tracked"] == 3
    for rank in range(processes):
        found = torch.load(elastic / f"{saved}-{restored}.{rank}")
        # BatchNorm's statistics are each process's own while DDP trains; the main process's are saved.
        for part in ("model", "optimizer", "position"):
            assert checkpoint_worker.same(found[part], expected[part]), (part, rank)
        if found["ema"] is not None:
            assert checkpoint_worker.same(
                found["ema"], expected["model"] if expected["ema"] is None else expected["ema"]
            )


@pytest.mark.ci
def test_files_are_those_of_the_plain_model_and_hold_tied_weights_under_both_names(elastic):
    for run in ("one", "two", "fsdp"):
        weights = load_file(find_newest_checkpoint(elastic / run) / "model.safetensors")
        assert weights.keys() == torch.load(elastic / "one.0")["model"].keys()
        assert torch.equal(weights["4.weight"], weights["5.weight"])


@pytest.mark.ci
def test_every_process_raises_the_same_error(elastic):
    messages = {(elastic / f"refused.{rank}").read_text() for rank in range(2)}
    assert len(messages) == 1
    assert "no complete checkpoint" in messages.pop()
