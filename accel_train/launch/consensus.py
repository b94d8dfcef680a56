"""One process decides and all act: what only the main process can know (a clock, a disk) is sent to the others.
What every process finds on its own (its copy of the data) may be wrong on one of them; then all end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from accel_train.errors import UserError

T = TypeVar("T")


def broadcast_from_main(accelerator: Accelerator, decide: Callable[[], T]) -> T:
    """Call `decide` on the main process, and return its result on every process. Collective.

    A UserError that it raises is raised on every process.
    """
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


def fail_together(accelerator: Accelerator, work: Callable[[], T]) -> T:
    """Call `work`, which may not be collective, on every process, and return its result. Collective.

    If it raises a UserError on some processes, such as those of a node with other files, every process raises one.
    """
    result, error = None, None
    try:
        result = work()
    except UserError as problem:
        error = problem
    found = gather_object([None if error is None else error.messages])
    failed = [rank for rank, messages in enumerate(found) if messages is not None]
    if failed and len(failed) < len(found):
        first, *others = found[failed[0]]
        raise UserError(f"On rank {failed[0]}, but not on all: {first}", *others) from error
    if error is not None:
        raise error
    return result  # type: ignore[return-value]
