"""What `accel-train init` copies: accelerate's config files, the job scripts, and a recipe to begin with.

In a checkout the config files and scripts are at the top of the repository. setup.py copies them into this folder of a
wheel, beside recipe.yaml and gitignore.
"""

from __future__ import annotations

from pathlib import Path

from accel_train.errors import UserError

FOLDERS = ("accelerate_configs", "slurm", "pbs")
RECIPE = "recipe.yaml"
GITIGNORE = ".gitignore"
_HERE = Path(__file__).parent


def starter_files() -> dict[str, Path]:
    """Return the files: path in the user's folder -> the file to copy. Raises UserError if they are not installed."""
    top = _HERE if (_HERE / FOLDERS[0]).is_dir() else _HERE.parents[1]
    sources = [path for folder in FOLDERS for path in sorted((top / folder).rglob("*")) if _is_ours(path)]
    files = {path.relative_to(top).as_posix(): path for path in sources} | {
        RECIPE: _HERE / RECIPE,
        GITIGNORE: _HERE / "gitignore",
    }
    missing = [folder for folder in FOLDERS if not any(name.startswith(f"{folder}/") for name in files)]
    if missing:
        raise UserError(
            f"the installation in {_HERE.parent} has no {', '.join(missing)}: it was copied, not installed. Install "
            "accel_train with pip, or take these folders from its repository."
        )
    return files


def _is_ours(path: Path) -> bool:
    return path.is_file() and path.suffix in (".yaml", ".sbatch", ".pbs") and not path.name.startswith(".")
