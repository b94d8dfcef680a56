"""Which device a process uses, for the devices that it sees; no device and no Accelerator is needed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel_train.launch import accelerator, rendezvous
from accel_train.launch.accelerator import create_accelerator
from accel_train.launch.environment import Launch


class DecidedError(Exception):
    """All that is decided is known: nothing is made of it."""


@dataclass
class Decided:
    device_id: str
    local_rank: str
    cpu: bool
    backend: str | None


SLICES = ["MIG-1", "MIG-2"]


def properties(number: int, **others: Any) -> SimpleNamespace:
    """A GPU: its place on the PCI bus and its UUID differ from every other's."""
    values = {"pci_domain_id": 0, "pci_bus_id": 0x17 + number, "pci_device_id": 0, "uuid": f"GPU-{number}"}
    return SimpleNamespace(**values | others)


@pytest.fixture
def decide(monkeypatch: pytest.MonkeyPatch) -> Any:
    def decided(launch: Launch, kind: str, seen: list[Any], *, share_gpus: bool = False) -> Decided:
        """For a process that sees these devices."""
        found: dict[str, Any] = {"device_id": ""}

        def rendezvous_of_ranks(_launch: Launch, device_id: str, _seconds: float, _trouble: str) -> None:
            found["device_id"] = device_id

        def make(cpu: bool, kwargs_handlers: list[Any], **_: Any) -> None:
            group = kwargs_handlers[0].to_kwargs()
            found.update(cpu=cpu, backend=group.get("backend"), local_rank=os.environ["LOCAL_RANK"])
            raise DecidedError

        module = SimpleNamespace(get_device_properties=lambda index: seen[index])
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: len(seen))
        monkeypatch.setattr(torch, "get_device_module", lambda _: module)
        monkeypatch.setattr(accelerator, "_full_gpu", lambda *_: "")
        monkeypatch.setattr(rendezvous, "rendezvous_of_ranks", rendezvous_of_ranks)
        monkeypatch.setattr(accelerator, "Accelerator", make)
        monkeypatch.setenv("LOCAL_RANK", str(launch.local_rank))
        monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
        with pytest.raises(DecidedError):
            create_accelerator(launch, share_gpus=share_gpus)
        return Decided(**found)

    return decided


def launches(count: int) -> list[Launch]:
    return [Launch("srun", rank, count, rank, count) for rank in range(count)]


def test_each_process_sees_its_own_gpu_only(decide: Any) -> None:
    """--gpus-per-task, a container or a cgroup: it is number 0 everywhere."""
    found = [decide(launch, "cuda", [properties(launch.local_rank)]) for launch in launches(4)]
    assert [each.local_rank for each in found] == ["0"] * 4
    assert [each.device_id for each in found] == [f"PCI 0000:{0x17 + rank:02x}:00" for rank in range(4)]
    assert not any(each.cpu or each.backend for each in found)


def test_all_processes_see_all_gpus(decide: Any) -> None:
    found = [decide(launch, "cuda", [properties(number) for number in range(4)]) for launch in launches(4)]
    assert [each.local_rank for each in found] == ["0", "1", "2", "3"]
    assert len({each.device_id for each in found}) == 4


def test_processes_that_see_the_same_single_gpu_are_found_out(decide: Any) -> None:
    assert len({decide(launch, "cuda", [properties(0)]).device_id for launch in launches(4)}) == 1
    # unless they may share it
    for launch in launches(4):
        assert decide(launch, "cuda", [properties(0)], share_gpus=True) == Decided("", "0", False, "gloo")


def test_two_mig_slices_of_one_gpu_are_one_gpu_to_nccl(decide: Any) -> None:
    """CUDA shows a process one slice, the first of CUDA_VISIBLE_DEVICES, with a UUID of its own."""
    one, other = (decide(each, "cuda", [properties(0, uuid=SLICES[each.rank])]) for each in launches(2))
    assert one.device_id == other.device_id != ""
    assert (one.local_rank, other.local_rank) == ("0", "0")


def test_rocm_and_xpu_tell_by_the_uuid(decide: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Partitions of one of AMD's GPUs may have its place on the bus in common; Intel's driver need not tell it."""
    seen = [properties(0, uuid=name) for name in ("one", "two")]
    assert [decide(each, "xpu", seen).device_id for each in launches(2)] == ["one", "two"]
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert [decide(each, "cuda", seen).device_id for each in launches(2)] == ["one", "two"]
    assert decide(launches(2)[1], "xpu", seen).local_rank == "1"


def test_several_processes_on_mps_train_on_the_cpu(decide: Any) -> None:
    assert [decide(each, "mps", [None]).cpu for each in launches(2)] == [True, True]


def test_a_gpu_whose_memory_other_programs_have_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported")

    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(torch, "empty", full)
    message = accelerator._full_gpu(torch.device("cuda"), Launch("srun", 2, 4, 2, 4))
    assert message.startswith("cuda:2 of ") and "has no free memory (CUDA error: out of memory): other" in message
