"""Architectures: a file each, named after `general.architecture`; the folder is the registry.

A file holds `config(metadata) -> Config` and `step(tape, w, kv, cfg)`, which calls operations and
nothing else. Knows no device and no file.
"""

import importlib
import pkgutil
from types import ModuleType
from typing import Any

from llamagraph.errors import FormatError

_SHARED = {"config"}


def architectures() -> list[str]:
    return sorted({m.name for m in pkgutil.iter_modules(__path__)} - _SHARED)


def load(metadata: Any) -> ModuleType:
    """The module of the file's architecture; FormatError names it and what is supported."""
    name = metadata.require("general.architecture", str)
    if name not in architectures():
        raise FormatError(
            f"{metadata.path}: general.architecture is {name!r}, which is not supported; "
            f"there are {', '.join(architectures())}"
        )
    return importlib.import_module(f"{__name__}.{name}")
