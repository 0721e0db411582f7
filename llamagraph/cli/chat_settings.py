"""/set: options that may change between answers, by their own names and with their own checks."""

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import click

from llamagraph.cli.groups import LineError
from llamagraph.cli.sampling_options import SAMPLING
from llamagraph.sampling import SamplingParams

GRAMMARS = ("grammar", "grammar_file", "json_schema", "json_schema_file")
CHANGING = (*SAMPLING, "sampler_seq", "ignore_eos", *GRAMMARS, "limit", "stop", "reasoning",
            "reasoning_budget", "context_shift", "special", "system", "show_timings",
            "fold_thinking", "perf")
UNSET = "default"
WORDS = {"on": True, "true": True, "1": True, "off": False, "false": False, "0": False}


def settable(params: Iterable[click.Parameter]) -> dict[str, click.Option]:
    """The options of a command that /set knows, by each of their long names."""
    found = [p for p in params if isinstance(p, click.Option) and p.name in CHANGING]
    return {name[2:]: p for p in found for name in p.opts if name.startswith("--")}


def read_value(option: click.Option, text: str, plain: Any) -> Any:
    """An option's value from text, or its default for "default"; LineError for a wrong one.

    `plain` takes escapes out of what is free text.
    """
    context = click.Context(click.Command("set"))
    if text == UNSET:
        nothing = click.Option(["--none"]).get_default(context)  # click's sign for no default
        default = option.get_default(context)
        return option.process_value(context, None if default is nothing else default)
    value: Any = text
    if option.is_flag:
        if text.lower() not in WORDS:
            raise LineError(f"{name_of(option)}: {text!r} is not on or off")
        value = WORDS[text.lower()]
    elif option.multiple:
        value = [plain(t) for t in _words(option, text)]
    elif option.type == click.STRING:
        value = plain(text)
    try:
        return option.process_value(context, value)
    except click.ClickException as error:
        raise LineError(f"{name_of(option)}: {error.message.removesuffix('.')}") from None


def _words(option: click.Option, text: str) -> list[str]:
    try:
        return [] if text == "none" else shlex.split(text)
    except ValueError as error:
        raise LineError(f"{name_of(option)}: {error}") from None


def name_of(option: click.Option) -> str:
    return next(name for name in option.opts if name.startswith("--"))[2:]


def change(options: dict[str, Any], name: str, value: Any, is_default: bool) -> None:
    """Puts a value among a run's options, as if the command line had had it."""
    options[name] = value
    given = options["sampling"]
    if name == "sampler_seq":
        name, is_default = "samplers", value is None
    if name in SAMPLING:
        given.pop(name, None)
        if not is_default:
            given[name] = value
    if name in GRAMMARS:
        for other in GRAMMARS:
            options[other] = (value or None) if other == name else None


def current(option: click.Option, options: Mapping[str, Any], defaults: Mapping[str, Any]) -> Any:
    """An option's value, the model's recommendation where nobody has set it."""
    if option.name in SAMPLING:
        return getattr(SamplingParams(**{**defaults, **options["sampling"]}), option.name)
    return options[option.name or ""]


def listed(options: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """What the samplers do now, one line a parameter that is not as llama.cpp has it."""
    params = SamplingParams(**{**defaults, **options["sampling"]})
    lines = []
    for f in fields(params):
        value = getattr(params, f.name)
        if f.name in SAMPLING and (f.name in ("temp", "top_k", "top_p", "min_p", "seed")
                                   or f.name in options["sampling"] or f.name in defaults):
            lines.append(f"{f.name.replace('_', '-')} {_shown(value)}")
    lines.append(f"predict {options['limit']}")
    return lines


def _shown(value: Any) -> str:
    if value is None:
        return "-1"
    if isinstance(value, tuple):
        return ";".join(value)
    return str(value)
