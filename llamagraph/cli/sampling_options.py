"""The options that say how tokens are chosen, and which texts may come.

Defaults are those of `SamplingParams`.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from llamagraph.cli.groups import OneText, grouped
from llamagraph.cli.prompt import read_text
from llamagraph.errors import LlamaGraphError


def number(*names: str, default: float, help: str, **more: Any) -> Callable:
    return click.option(*names, type=float, default=default, show_default=True, help=help,
                        metavar="X", **more)


def whole(*names: str, default: int, help: str, least: int = -1, **more: Any) -> Callable:
    return click.option(*names, type=click.IntRange(min=least), default=default, show_default=True,
                        help=help, metavar="N", **more)


sampling_options = grouped(
    click.option("-s", "--seed", type=int, default=-1, help="Random seed; -1 draws one."),
    click.option("--samplers", metavar="NAMES", callback=lambda *a: _samplers(a[2], "names"),
                 help="Which samplers run, in which order, separated by semicolons. By default "
                      "penalties dry top_n_sigma top_k typ_p top_p min_p xtc temperature."),
    click.option("--sampler-seq", "--sampling-seq", metavar="LETTERS",
                 callback=lambda *a: _samplers(a[2], "letters"),
                 help="The same by letters: edskypmxt."),
    number("--temp", "--temperature", default=0.8,
           help="Temperature; 0 takes the likeliest token."),
    number("--dynatemp-range", default=0.0,
           help="Temperature up to so much lower where the choice is certain, higher where not."),
    number("--dynatemp-exp", default=1.0, help="Exponent of the entropy in that."),
    whole("--top-k", default=40, help="Keep the k likeliest tokens; 0 keeps all."),
    number("--top-p", default=0.95, help="Keep the likeliest that hold p together; 1 keeps all."),
    number("--min-p", default=0.05, help="Keep those p times as likely as the best; 0 keeps all."),
    number("--typical", "--typical-p", default=1.0,
           help="Keep the p whose surprise is nearest to the entropy; 1 keeps all."),
    number("--top-nsigma", "--top-n-sigma", "top_n_sigma", default=-1.0,
           help="Keep logits within n standard deviations of the best; -1 keeps all."),
    number("--xtc-probability", default=0.0,
           help="How often the top choices but the last are excluded."),
    number("--xtc-threshold", default=0.1, help="What a top choice has at least."),
    number("--repeat-penalty", default=1.0,
           help="Divide the logits of recent tokens; 1 does nothing."),
    whole("--repeat-last-n", default=64,
          help="Tokens that the penalties look at; -1 is all, 0 none."),
    number("--presence-penalty", default=0.0, help="Subtract from the logit of each recent token."),
    number("--frequency-penalty", default=0.0, help="Subtract for each time a token is recent."),
    number("--dry-multiplier", default=0.0,
           help="Penalise tokens that would go on with a repetition; 0 does not."),
    number("--dry-base", default=1.75, help="The penalty grows by this with each token repeated."),
    whole("--dry-allowed-length", default=2, least=0, help="Repetitions so long are free."),
    whole("--dry-penalty-last-n", default=64, help="Tokens that are looked at; -1 is all."),
    click.option("--dry-sequence-breaker", "dry_sequence_breakers", multiple=True, type=OneText(),
                 metavar="TEXT", help="Nothing repeats across it; in place of newline, :, \" and "
                                      "*. May be given several times; none for no breaker."),
    whole("--mirostat", default=0, least=0,
          help="1 or 2: steer the surprise of the text, in place of the other samplers."),
    number("--mirostat-ent", default=5.0, help="The surprise that is wanted, in bits."),
    number("--mirostat-lr", default=0.1, help="How fast it is reached."),
    number("--adaptive-target", default=-1.0,
           help="Adaptive-p: choose tokens near this probability; -1 does not."),
    number("--adaptive-decay", default=0.9, help="How long what was chosen counts, up to 0.99."),
    click.option("-l", "--logit-bias", "logit_bias", multiple=True, metavar="ID(+|-)BIAS",
                 callback=lambda *a: read_biases(a[2]),
                 help="Add to a token's logit: 15043+1, or 15043-inf to forbid it."),
    click.option("--ignore-eos", is_flag=True, help="Go on past the end of the answer."),
    title="Sampling",
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
    title="Sampling",
)
SAMPLING = (
    "seed", "samplers", "temp", "dynatemp_range", "dynatemp_exp", "top_k", "top_p", "min_p",
    "typical", "top_n_sigma", "xtc_probability", "xtc_threshold", "repeat_penalty",
    "repeat_last_n", "presence_penalty", "frequency_penalty", "dry_multiplier", "dry_base",
    "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "mirostat",
    "mirostat_ent", "mirostat_lr", "adaptive_target", "adaptive_decay", "logit_bias",
)  # of the options, those that are fields of SamplingParams


def chosen_sampling(context: click.Context, options: dict[str, Any]) -> dict[str, Any]:
    """The parameters that the user has set, by option or environment; others are the file's."""
    if options["samplers"] is not None and options["sampler_seq"] is not None:
        raise click.UsageError("--samplers and --sampler-seq both set the order; give one")
    given = {name: options[name] for name in SAMPLING
             if context.get_parameter_source(name) != ParameterSource.DEFAULT}
    if options["sampler_seq"] is not None:
        given["samplers"] = options["sampler_seq"]
    if given.get("dry_sequence_breakers") == ("none",):
        given["dry_sequence_breakers"] = ()
    return given


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


def _samplers(text: str | None, kind: str) -> tuple[str, ...] | None:
    if text is None:
        return None
    from llamagraph.sampling import read_letters, read_samplers

    try:
        return read_samplers(text) if kind == "names" else read_letters(text)
    except LlamaGraphError as error:
        raise click.BadParameter(str(error)) from None


def read_biases(texts: tuple[str, ...]) -> dict[int, float]:
    """Token ids and what is added to their logits."""
    biases = {}
    for text in texts:
        match = re.fullmatch(r"(\d+)([+-](?:inf|false|\d+(?:\.\d*)?))", text, re.IGNORECASE)
        if match is None:
            raise click.BadParameter(f"{text!r} is not ID+BIAS or ID-BIAS, as in 15043+1")
        biases[int(match[1])] = float(match[2].lower().replace("false", "inf"))
    return biases
