"""Put accelerate's config files and the job scripts, which are at the top of the repository, into wheel and sdist.

`accel-train init` copies them from there. Everything else about the package is in pyproject.toml.
"""

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent))  # a build does not put it there
from accel_train.starter import FOLDERS, starter_files


def files_of_repository() -> dict[str, Path]:
    """Return those of the starter's files that are not in the package."""
    return {name: path for name, path in starter_files().items() if name.startswith(FOLDERS)}


class BuildWithStarter(build_py):
    """Copy the starter's files into the package. An editable installation reads them where they are."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for name, path in files_of_repository().items():
                target = Path(self.build_lib, "accel_train", "starter", name)
                target.parent.mkdir(parents=True, exist_ok=True)
                self.copy_file(str(path), str(target), preserve_mode=False)

    def get_source_files(self) -> list[str]:
        top = Path(__file__).resolve().parent
        ours = [str(path.resolve().relative_to(top)) for path in files_of_repository().values()]
        return [*super().get_source_files(), *ours]


setup(cmdclass={"build_py": BuildWithStarter})
