"""Layers of timm and torchvision, which take seconds to import: a model that has some has imported its library."""

from __future__ import annotations

import sys

from torch import nn


def library_layer(module: str, name: str) -> type[nn.Module] | None:
    """A class of a library's module; None if nothing has imported that, so that no model can have such a layer."""
    found: type[nn.Module] | None = getattr(sys.modules.get(module), name, None)
    return found
