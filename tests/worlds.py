"""Programs under real launchers, and what each of their processes says of the world that it finds itself in."""

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
    """This process's environment without any launcher's variables, and with these."""
    clean = {name: value for name, value in os.environ.items() if not LAUNCHERS.search(name)}
    return {**clean, "PATH": f"{BIN}{os.pathsep}{clean['PATH']}", **variables}


def start(*command: str, **variables: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        command, env=environment(**variables), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(*processes: "subprocess.Popen[str] | helpers.Captured") -> tuple[list[int], list[dict], str]:
    """Exit codes, the worlds that the processes printed in the order of their ranks, and all their output."""
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    worlds = [json.loads(line) for out, _ in outputs for line in out.splitlines() if line.startswith("{")]
    text = "".join(out + err for out, err in outputs)
    return [p.returncode for p in processes], sorted(worlds, key=lambda world: world["rank"]), text
