"""Run programs under real launchers, and read what each process reports about its world."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import helpers

BIN = Path(sys.executable).parent
PROGRAM = str(helpers.ROOT / "tests" / "print_world.py")
LAUNCHERS = re.compile(r"RANK|WORLD_SIZE|MASTER_|SLURM|PMI|OMPI|PBS|ACCELERATE|OMP_|TORCHELASTIC|CUDA_VISIBLE")


def environment(**variables: str) -> dict[str, str]:
    """Return this process's environment without the variables of launchers, plus the given ones."""
    clean = {name: value for name, value in os.environ.items() if not LAUNCHERS.search(name)}
    return {**clean, "PATH": f"{BIN}{os.pathsep}{clean['PATH']}", **variables}


def start(*command: str, **variables: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        command, env=environment(**variables), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(*processes: "subprocess.Popen[str] | helpers.Captured") -> tuple[list[int], list[dict], str]:
    """Return the exit codes, the worlds that the processes printed (by rank), and all output."""
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    worlds = [json.loads(line) for out, _ in outputs for line in out.splitlines() if line.startswith("{")]
    text = "".join(out + err for out, err in outputs)
    return [p.returncode for p in processes], sorted(worlds, key=lambda world: world["rank"]), text
