"""Options that commands share, under llama.cpp's names."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from llamagraph import __version__

MODES = ["stream", "capture", "build", "partial"]


def grouped(*options: Callable) -> Callable:
    """One decorator of several options, shown in their order."""

    def decorate(command: Callable) -> Callable:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


show_version = click.version_option(__version__, message=f"llamagraph {__version__}")
model_options = grouped(
    click.option("-m", "--model", type=click.Path(path_type=Path), metavar="FILE",
                 help="GGUF model file. Without it the default model is fetched once."),
    click.option("-hf", "--hf-repo", "repo", metavar="USER/MODEL[:QUANT]",
                 help="Fetch the model from Hugging Face, once."),
    click.option("-c", "--ctx-size", "n_ctx", type=click.IntRange(min=0), default=0,
                 help="Longest sequence in tokens; 0 takes the model's own."),
    click.option("--offline", is_flag=True, help="Never fetch anything."),
)
place_options = grouped(
    click.option("--device", default="auto", show_default=True, metavar="NAME",
                 help="Where to run: auto, cpu, cuda, or cuda:1 for the second GPU."),
    click.option("-t", "--threads", type=click.IntRange(min=1), help="CPU threads."),
)
device_options = grouped(
    place_options,
    click.option("--graph/--no-graph", default=None,
                 help="Replay each step as one graph (default on a GPU), or launch by launch."),
    click.option("--graph-mode", "mode", type=click.Choice(MODES),
                 help="How steps run: launch by launch, or a graph that is captured, built node by "
                      "node, or cut in parts."),
)
sampling_options = grouped(
    click.option("-s", "--seed", type=int, default=-1, help="Random seed; -1 draws one."),
    click.option("--temp", type=float, default=0.8, show_default=True,
                 help="Temperature; 0 takes the likeliest token."),
    click.option("--top-k", type=int, default=40, show_default=True, help="0 keeps all."),
    click.option("--top-p", type=float, default=0.95, show_default=True, help="1 keeps all."),
    click.option("--min-p", type=float, default=0.05, show_default=True, help="0 keeps all."),
    click.option("--typical", type=float, default=1.0, show_default=True, help="1 keeps all."),
    click.option("--repeat-penalty", type=float, default=1.0, show_default=True,
                 help="Divide the logits of recent tokens; 1 does nothing."),
    click.option("--repeat-last-n", type=click.IntRange(min=-1), default=64, show_default=True,
                 help="Tokens that the penalties look at; -1 is all, 0 none."),
    click.option("--presence-penalty", type=float, default=0.0, show_default=True,
                 help="Subtract from the logit of each recent token."),
    click.option("--frequency-penalty", type=float, default=0.0, show_default=True,
                 help="Subtract for each time a token is recent."),
    click.option("-l", "--logit-bias", "logit_bias", multiple=True, metavar="ID(+|-)BIAS",
                 callback=lambda *a: read_biases(a[2]),
                 help="Add to a token's logit: 15043+1, or 15043-inf to forbid it."),
    click.option("--ignore-eos", is_flag=True, help="Go on past the end of the answer."),
)

grammar_options = grouped(
    click.option("--grammar", metavar="GBNF",
                 help="Write only what this grammar allows (see the README)."),
    click.option("--grammar-file", type=click.Path(path_type=Path), metavar="FILE",
                 help="The same, read from a file."),
    click.option("-j", "--json-schema", metavar="SCHEMA",
                 help="Write JSON that fits this schema; {} is any object."),
    click.option("-jf", "--json-schema-file", type=click.Path(path_type=Path), metavar="FILE",
                 help="The same, read from a file."),
)


def read_grammar(options: dict[str, Any]) -> dict[str, str]:
    """What the grammar options ask for, as arguments of `Model.matcher`; {} for nothing."""
    given = [name for name in ("grammar", "grammar_file", "json_schema", "json_schema_file")
             if options[name] is not None]
    if not given:
        return {}
    if len(given) > 1:
        first, second = (f"--{name.replace('_', '-')}" for name in given[:2])
        raise click.UsageError(f"{first} and {second} exclude each other; give one")
    name, value = given[0], options[given[0]]
    source = f"--{name}".replace("_", "-")
    if isinstance(value, Path):
        source, value = str(value), read_text(value)
    return {name.removesuffix("_file"): value, "source": source}


def read_text(file: Path) -> str:
    """A text file's contents; ClickException for what is none."""
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise click.ClickException(f"{file}: cannot be read as text: {error}") from None


def read_biases(texts: tuple[str, ...]) -> dict[int, float]:
    """Token ids and what is added to their logits."""
    biases = {}
    for text in texts:
        match = re.fullmatch(r"(\d+)([+-](?:inf|false|\d+(?:\.\d*)?))", text, re.IGNORECASE)
        if match is None:
            raise click.BadParameter(f"{text!r} is not ID+BIAS or ID-BIAS, as in 15043+1")
        biases[int(match[1])] = float(match[2].lower().replace("false", "inf"))
    return biases


def chosen_mode(mode: str | None, graph: bool | None) -> str | None:
    """The executor that --graph-mode, --graph and --no-graph ask for."""
    if mode is not None and graph is not None and graph != (mode != "stream"):
        raise click.UsageError(f"--graph-mode {mode} contradicts --{'' if graph else 'no-'}graph")
    if mode is not None or graph is None:
        return mode
    return "capture" if graph else "stream"
