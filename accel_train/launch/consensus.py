"""One process decides, all act: what only the main process can know (a clock, a disk) made known to the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from accel_train.errors import UserError

T = TypeVar("T")


def decided_by_main(accelerator: Accelerator, decide: Callable[[], T]) -> T:
    """What `decide` returns on the main process, on every process; a UserError of its is raised on every process."""
    outcome: list[T | UserError | None] = [None]
    if accelerator.is_main_process:
        try:
            outcome = [decide()]
        except UserError as error:
            outcome = [error]
    broadcast_object_list(outcome)
    if isinstance(outcome[0], UserError):
        raise outcome[0]
    return outcome[0]  # type: ignore[return-value]
