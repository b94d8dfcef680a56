"""Facts about the initial weights of a run, saved in the run so that it can resume without these weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Origin:
    """Of a model with a name such as hf-hub:ORG/NAME, and of --model.weights. Every field is empty for other runs."""

    model: str = ""
    """The model.name that `architecture` belongs to."""
    weights: str = ""
    """The model.weights that was read, as the user wrote it."""
    architecture: str = ""
    """For hf-hub: and local-dir:, what their config.json says, as JSON: timm's name, arguments and configuration."""
    sha256: str = ""
    """Of the file of weights."""
    image_size: int | None = None
    """Height and width of the images that the weights were trained with."""
    mean: tuple[float, ...] | None = None
    """Subtracted from each channel (0 to 1) when the weights were trained."""
    std: tuple[float, ...] | None = None


def read_origin(saved: Any) -> Origin:
    """Return the Origin that a file contains as JSON. Raises ValueError and TypeError if it cannot be one."""
    values = dict(saved)
    for name in ("mean", "std"):
        if values.get(name) is not None:
            values[name] = tuple(float(number) for number in values[name])
    origin = Origin(**values)
    texts = origin.model, origin.weights, origin.architecture, origin.sha256
    if not all(isinstance(text, str) for text in texts) or type(origin.image_size) not in (int, type(None)):
        raise ValueError(f"origin is {str(saved)[:40]}")
    if origin.architecture:
        described = json.loads(origin.architecture)
        kinds = {"name": str, "arguments": dict, "config": dict}
        if not isinstance(described, dict) or any(not isinstance(described.get(k), t) for k, t in kinds.items()):
            raise ValueError("origin.architecture is not one")
    return origin


def compare_by_content(changes: dict[str, str], old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
    """Return the changes between two flat configurations, in which weights are compared by content, not by path.

    What differs in the origin becomes a change of the option that named it, model.weights or model.name.
    """
    named = {"origin.model", "origin.weights"}
    content = {key: text for key, text in changes.items() if key.startswith("origin.") and key not in named}
    rest = {key: text for key, text in changes.items() if not key.startswith("origin.")}
    if content:
        option = "model.weights" if old["model.weights"] or new["model.weights"] else "model.name"
        shown = [key for key in content if key in ("origin.sha256", "origin.architecture")] or list(content)
        before, after = (
            ", ".join(f"{key.removeprefix('origin.')} {str(flat[key])[:12]}" for key in shown) for flat in (old, new)
        )
        if option not in rest or old[option] == new[option]:
            rest[option] = f"{old[option]} ({before}) -> {new[option]} ({after})"
    elif new["origin.sha256"]:
        rest.pop("model.weights", None)
    return rest
