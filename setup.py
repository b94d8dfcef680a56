"""Put accelerate's config files and the job scripts, which are at the top of the repository, into wheel and sdist.

`accel-train init` copies them from there. Everything else about the package is in pyproject.toml.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

TOP = Path(__file__).resolve().parent


def starter_files() -> list[Path]:
    """Return the starter's files that are not in the package."""
    folders = (TOP / name for name in ("accelerate_configs", "slurm", "pbs"))
    return [path for folder in folders for path in folder.iterdir() if path.suffix in (".yaml", ".sbatch", ".pbs")]


class BuildWithStarter(build_py):
    """Copy the starter's files into the package. An editable installation reads them where they are."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for path in starter_files():
                target = Path(self.build_lib, "accel_train", "starter", path.relative_to(TOP))
                target.parent.mkdir(parents=True, exist_ok=True)
                self.copy_file(str(path), str(target), preserve_mode=False)

    def get_source_files(self) -> list[str]:
        return [*super().get_source_files(), *(str(path.relative_to(TOP)) for path in starter_files())]


setup(cmdclass={"build_py": BuildWithStarter})
