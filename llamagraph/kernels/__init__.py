"""Kernel families: a file each, with an operation, its variants, and their meaning in numpy.

An operation writes launches to a `Tape`; which kernels it takes is decided there, from the target,
the step's key and the types of the weights. Knows no device, no file and no model.
"""

import importlib
import pkgutil

from llamagraph.program.launch import Kernel


def all_kernels() -> dict[str, Kernel]:
    """Every kernel of every family, by name; the folder is the registry."""
    found = {}
    for module in pkgutil.iter_modules(__path__):
        family = importlib.import_module(f"{__name__}.{module.name}")
        found.update({k.name: k for k in vars(family).values() if isinstance(k, Kernel)})
    return found
