"""Finding the image files below a folder."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from accel_train.errors import UserError

if TYPE_CHECKING:
    pass


EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""As torchvision's ImageFolder has them: other files (Thumbs.db, notes) are no images."""


def is_image(name: str) -> bool:
    """Whether a file of this name (the last part of a path) counts as an image."""
    return name.lower().endswith(EXTENSIONS) and not name.startswith(".")


@dataclass(frozen=True)
class FolderContents:
    """What is below a folder. Paths are relative to it, with "/", and sorted; what is hidden is not among them."""

    images: list[str]
    folders: list[str]
    others: Counter[str]
    """Files that count as no images, by their endings: {".heic": 12}."""
    repeated: list[str]
    """Folders that a symbolic link leads to a second time: left out."""


def find_images(root: Path) -> FolderContents:
    """The images below `root`, each folder once, whatever symbolic links lead to it.

    Raises UserError if a folder cannot be read.
    """
    images: list[str] = []
    folders: list[str] = []
    others: Counter[str] = Counter()
    repeated: list[str] = []

    def refuse(error: OSError) -> None:  # os.walk would go on without the folder
        raise UserError(f"the folder {error.filename} cannot be read: {error.strerror}.")

    def walk(top: Path) -> list[str]:
        """Note all that is below `top`, a folder below the root or the root; return its links to folders."""
        links: list[str] = []
        for where, below, files in os.walk(top, onerror=refuse):
            here = Path(where).relative_to(root).as_posix()
            real = os.path.realpath(where)
            if real in seen:
                repeated.append(here)
                below.clear()
                continue
            seen.add(real)
            prefix = "" if here == "." else here + "/"
            below[:] = [name for name in below if not name.startswith(".")]
            for name in below:
                (links if Path(where, name).is_symlink() else folders).append(prefix + name)
            for name in files:
                if is_image(name):
                    images.append(prefix + name)
                elif not name.startswith("."):
                    others[PurePath(name).suffix.lower() or name] += 1
        return links

    # A link upwards would lead round in a circle.
    seen = {str(above) for above in Path(os.path.realpath(root)).parents}
    links = walk(root)
    while links:  # behind all folders that are no links, and in the same order on every machine
        following = sorted(links)
        links = []
        for link in following:
            if os.path.realpath(root / link) not in seen:
                folders.append(link)
                links += walk(root / link)
            else:
                repeated.append(link)
    return FolderContents(sorted(images), sorted(folders), others, sorted(repeated))
