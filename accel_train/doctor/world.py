"""The processes: are they those that the launcher promised, and do they run the same program?"""

from __future__ import annotations

from accel_train.doctor.check import FAIL, PASS, Check, Examination, Finding
from accel_train.records.environment import environment


def processes(exam: Examination) -> Finding:
    """All processes that the launcher promised have met."""
    launch, hosts = exam.launch, len(set(exam.hosts))
    found = f"{len(exam.hosts)} on {hosts} host{'s' if hosts > 1 else ''} ({launch.launcher})"
    return Finding(PASS, found, f"{launch.world_size}, as the launcher says")


def versions(exam: Examination) -> Finding:
    """The same Python, packages, CUDA and commit on all ranks."""
    mine = environment(exam.launch.world_size, [str(exam.accelerator.device)])
    facts = {"python": mine["python"], **mine["packages"], "CUDA": str(mine["cuda"]), "commit": str(mine["commit"])}
    everyone = exam.gather(facts)
    different = [name for name in facts if len({each.get(name) for each in everyone}) > 1]
    expected = "the same on all ranks: results of different versions differ"
    if not different:
        shown = ", ".join(f"{name} {facts[name]}" for name in ("python", "torch", "accelerate"))
        return Finding(PASS, f"{shown}, and {len(facts) - 3} more", expected)
    name = different[0]
    other = next(rank for rank, each in enumerate(everyone) if each.get(name) != everyone[0].get(name))
    measured = f"{name} is {everyone[other].get(name)} on {exam.names([other])}, {everyone[0].get(name)} on rank 0"
    return Finding(FAIL, measured, expected, f"Activate the same environment on all nodes ({', '.join(different)}).")


CHECKS = (Check("processes", processes, quick=True), Check("versions", versions, quick=True))
