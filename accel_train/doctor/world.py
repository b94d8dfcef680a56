"""The processes: are they those that the launcher promised, and do they run the same program?"""

from __future__ import annotations

import os
import time
from pathlib import Path

from accel_train.doctor.check import FAIL, NOT_CHECKED, PASS, Check, Examination, Finding, judged
from accel_train.errors import counted
from accel_train.records.provenance import environment

DRIVER = Path("/proc/driver/nvidia/version")
CLOCK_SECONDS = 1.0


def processes(exam: Examination) -> Finding:
    """All processes that the launcher promised have met."""
    launch, hosts = exam.launch, len(set(exam.hosts))
    found = f"{len(exam.hosts)} on {counted(hosts, 'host')} ({launch.launcher})"
    return Finding(PASS, found, f"{launch.world_size}, as the launcher says")


def versions(exam: Examination) -> Finding:
    """The same Python, packages, CUDA and commit on all ranks."""
    mine = environment(exam.launch.world_size, [str(exam.accelerator.device)])
    facts = {"python": mine["python"], **mine["packages"], "CUDA": str(mine["cuda"]), "commit": str(mine["commit"])}
    facts["driver"] = _driver()
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


def _driver() -> str:
    """What the driver of NVIDIA's GPUs says of itself; "" without one."""
    try:
        return DRIVER.read_text().partition("\n")[0]
    except OSError:
        return ""


OF_THE_JOB = ("NCCL_", "GLOO_", "TORCH_NCCL_", "CUBLAS_", "ACCELERATE_", "FSDP_", "OMP_NUM_THREADS", "PYTHONHASHSEED")
DIFFERENT = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # nodes may name the interface that they share differently


def variables(exam: Examination) -> Finding:
    """The environment variables that change what is computed or how processes connect are the same on all ranks."""
    mine = {key: value for key, value in os.environ.items() if key.startswith(OF_THE_JOB) and key not in DIFFERENT}
    everyone = exam.gather(mine)
    names = sorted({name for each in everyone for name in each})
    expected = "the same on all ranks"
    for name in names:
        if other := [rank for rank, each in enumerate(everyone) if each.get(name) != everyone[0].get(name)]:
            there, here = everyone[other[0]].get(name, "not set"), everyone[0].get(name, "not set")
            measured = f"{name} is {there} on {exam.names(other)}, {here} on rank 0"
            return Finding(FAIL, measured, expected, f"Export {name} in the job script, before srun.")
    return Finding(PASS, f"{len(names)} of NCCL, gloo, cuBLAS, Accelerate, OpenMP", expected)


def clocks(exam: Examination) -> Finding:
    """The clocks of the hosts agree: the ownership of a run and the times of its files depend on them."""
    offsets = []
    for _ in range(3):  # a barrier ends on all ranks within milliseconds; the best of three is least disturbed
        exam.accelerator.wait_for_everyone()
        everyone = exam.gather(time.time())
        offsets.append([each - everyone[0] for each in everyone])
    best = min(offsets, key=lambda each: max(map(abs, each)))
    far = max(range(len(best)), key=lambda rank: abs(best[rank]))
    expected = f"within {CLOCK_SECONDS:.0f} s of rank 0"
    if len(set(exam.hosts)) == 1 and abs(best[far]) <= CLOCK_SECONDS:
        return Finding(NOT_CHECKED, "one host has one clock", expected)
    measured = f"{exam.names([far])} is {best[far]:+.2f} s from rank 0"
    advice = f"Ask the administrators to set the clock of {exam.hosts[far]} (chrony)."
    return judged(abs(best[far]) <= CLOCK_SECONDS, measured, expected, advice)


CHECKS = (
    Check("processes", processes, quick=True),
    Check("versions", versions, quick=True),
    Check("variables", variables, quick=True),
    Check("clocks", clocks, quick=True),
)
