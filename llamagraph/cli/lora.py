"""Options for LoRA adapters, which every command that loads a model can share. Opens no file."""

import csv
from math import isfinite
from typing import Any

import click

from llamagraph.cli.groups import OneText, grouped


def read_files(texts: tuple[str, ...]) -> list[tuple[str, float]]:
    """FILE,... as files with scale 1. A name with a comma stands in quotation marks, as in CSV."""
    return [(name, 1.0) for text in texts for name in _values(text)]


def read_scaled(texts: tuple[str, ...]) -> list[tuple[str, float]]:
    """FILE:SCALE,... as files and scales."""
    found = []
    for part in (part for text in texts for part in _values(text)):
        name, _, number = part.rpartition(":")
        try:
            scale = float(number)
        except ValueError:
            scale = float("nan")
        if not name or not isfinite(scale):
            raise click.BadParameter(f"{part!r} is not FILE:SCALE, as in adapter.gguf:0.5")
        found.append((name, scale))
    return found


def _values(text: str) -> list[str]:
    return [value for value in next(csv.reader([text]), []) if value]


def chosen_lora(options: dict[str, Any]) -> list[tuple[str, float]]:
    """Files and scales of the adapters that a command was given."""
    return options["lora"] + options["lora_scaled"]


lora_options = grouped(
    click.option("--lora", multiple=True, type=OneText(), metavar="FILE,...",
                 callback=lambda *a: read_files(a[2]),
                 help="LoRA adapters to apply, as GGUF files."),
    click.option("--lora-scaled", multiple=True, type=OneText(), metavar="FILE:SCALE,...",
                 callback=lambda *a: read_scaled(a[2]),
                 help="The same, each with a scale in place of 1."),
    title="Model",
)
