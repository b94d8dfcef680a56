"""A virtual environment with nothing but the wheel installed, and the dependencies of this environment."""

from __future__ import annotations

import shutil
import site
import subprocess
import sys
from pathlib import Path

import helpers

SOURCES = ("accel_train", "accelerate_configs", "slurm", "pbs", "pyproject.toml", "setup.py", "README.md", "LICENSE")


def build(folder: Path) -> Path:
    """Build an sdist of this checkout and a wheel of that sdist, without a network; return the wheel."""
    source = folder / "source"
    for name in SOURCES:
        path = helpers.ROOT / name
        copy = shutil.copytree if path.is_dir() else shutil.copy2
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        copy(path, source / name)
    _run(sys.executable, "-c", "from setuptools.build_meta import build_sdist; build_sdist('dist')", cwd=source)
    (sdist,) = (source / "dist").iterdir()
    unpacked = folder / "unpacked"
    shutil.unpack_archive(sdist, unpacked)
    (top,) = unpacked.iterdir()
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    _run(*pip, "--wheel-dir", str(folder), str(top), cwd=folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(folder: Path) -> Path:
    """Return the new virtual environment `folder`/env in which the wheel is installed."""
    environment = folder / "env"
    wheel = build(folder)
    _run(sys.executable, "-m", "venv", "--without-pip", str(environment), cwd=folder)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    _run(*pip, str(wheel), cwd=folder)
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text("".join(f"{path}\n" for path in site.getsitepackages()))
    program = environment / "bin" / "accelerate"
    program.write_text(
        f"#!{python}\nimport sys\nfrom accelerate.commands.accelerate_cli import main\nsys.exit(main())\n"
    )
    program.chmod(0o755)
    return environment


def _run(*command: str, cwd: Path) -> None:
    done = subprocess.run(command, cwd=cwd, env=helpers.environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
