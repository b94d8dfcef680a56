"""All processes act alike; what they send each other is passed on here, without any process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from accel_train.errors import UserError
from accel_train.launch import agreement
from accel_train.launch.agreement import broadcast_from_main, check_agreement, fail_together


def outcomes(patch: pytest.MonkeyPatch, work: Callable[[Any, int], Any], processes: int = 2) -> list[Any]:
    """What `work(accelerator, rank)` returns on each process; an error as its text."""
    accelerators = [SimpleNamespace(num_processes=processes, is_main_process=rank == 0) for rank in range(processes)]
    sent: list[Any] = []

    def send(mine: list[Any]) -> list[Any]:
        sent.append(mine[0])
        return mine

    patch.setattr(agreement, "gather_object", send)
    patch.setattr(agreement, "broadcast_object_list", send)
    for rank, accelerator in enumerate(accelerators):
        patch.setattr(agreement, "hostname", lambda rank=rank: f"node{rank}")
        with contextlib.suppress(UserError):
            work(accelerator, rank)

    def receive(mine: list[Any]) -> None:
        mine[0] = sent[0]

    patch.setattr(agreement, "gather_object", lambda mine: list(sent))
    patch.setattr(agreement, "broadcast_object_list", receive)
    found = []
    for rank, accelerator in enumerate(accelerators):
        try:
            found.append(work(accelerator, rank))
        except UserError as error:
            found.append(str(error))
    return found


def test_the_main_process_decides_and_its_error_is_everybodys(monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcomes(monkeypatch, lambda acc, rank: broadcast_from_main(acc, lambda: f"of {rank}")) == ["of 0"] * 2

    def refuse() -> None:
        raise UserError("the folder is a file")

    assert outcomes(monkeypatch, lambda acc, _: broadcast_from_main(acc, refuse)) == ["the folder is a file"] * 2


def test_what_differs_is_named_with_its_ranks_and_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = ["60", "60", "59", "59"]
    found = outcomes(monkeypatch, lambda acc, rank: check_agreement(acc, samples=lengths[rank], classes="a b"), 4)
    assert len(set(found)) == 1
    assert "samples is '59' on ranks 2 (node2), '60' on rank 0 (node0); samples is '59' on ranks 3 (node3)" in found[0]
    assert "classes" not in found[0]
    assert outcomes(monkeypatch, lambda acc, rank: check_agreement(acc, samples="60", classes="a b")) == [None] * 2


def test_long_facts_of_the_same_length_are_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = ["cat " * 20 + "dog", "cat " * 20 + "cow"]
    found = outcomes(monkeypatch, lambda acc, rank: check_agreement(acc, classes=classes[rank]))
    assert all("classes is '83 characters with CRC" in text for text in found)


def test_an_error_on_one_process_is_an_error_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def work_of(failing: tuple[int, ...]) -> Callable[[Any, int], Any]:
        def work(rank: int) -> str:
            if rank in failing:
                raise UserError("no such image")
            return "loaded"

        return lambda acc, rank: fail_together(acc, lambda: work(rank))

    assert outcomes(monkeypatch, work_of(())) == ["loaded"] * 2
    assert outcomes(monkeypatch, work_of((1,))) == ["On rank 1, but not on all: no such image"] * 2
    assert outcomes(monkeypatch, work_of((0, 1))) == ["no such image"] * 2
