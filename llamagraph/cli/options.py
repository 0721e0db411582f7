"""Options that commands share, under llama.cpp's names: which model, and where it runs."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from llamagraph import __version__
from llamagraph.cli.groups import LineError, OneText, grouped

MODES = ["stream", "capture", "build", "partial", "loop"]
KV_TYPES = ["f32", "f16", "bf16", "q8_0", "q4_0"]
DEVICE_NAME = re.compile(r"(auto|cpu|cuda)|cuda:?(\d+)", re.IGNORECASE)

def only(*values: str, advice: str) -> Callable[..., str]:
    """The callback of an option that has one meaning here, whatever llama.cpp's others are."""

    def read(context: click.Context, param: click.Parameter, value: str) -> str:
        if value not in values:
            raise LineError(f"{param.opts[0]} {value}: {advice}; use {' or '.join(values)}")
        return value

    return read


show_version = click.version_option(__version__, message=f"llamagraph {__version__}")
model_options = grouped(
    click.option("-m", "--model", type=click.Path(path_type=Path), metavar="FILE",
                 help="GGUF model file. Without it the default model is fetched once."),
    click.option("-hf", "-hfr", "--hf-repo", "repo", metavar="USER/MODEL[:QUANT]",
                 help="Fetch the model from Hugging Face, once."),
    click.option("-hff", "--hf-file", metavar="FILE", help="Which file of --hf-repo."),
    click.option("--offline", is_flag=True, help="Never fetch anything."),
    click.option("-c", "--ctx-size", "n_ctx", metavar="N", type=click.IntRange(min=0), default=0,
                 help="Longest sequence in tokens; 0 takes the model's own."),
    title="Model",
)
persist_option = click.option(
    "--l2-persist", type=click.Choice(["off", "auto"]), default="off", show_default=True,
    help="Let a GPU's L2 cache keep what fits of the weights from one token to the next.")
arch_tuning = click.option(
    "--arch-tuning", metavar="NAME",
    help="Plan with another architecture's choices of kernels, as in sm_80; they are compiled for "
         "the GPU that is there.")
place_options = grouped(
    click.option("-dev", "--device", default="auto", show_default=True, metavar="NAME",
                 callback=lambda *a: read_device(a[2]),
                 help="Where to run: auto, cpu, cuda, or cuda:1 for the second GPU."),
    click.option("-t", "--threads", metavar="N", type=click.IntRange(min=1), help="CPU threads."),
    persist_option, arch_tuning,
    title="GPU and graphs",
)
kv_options = grouped(*(
    click.option(f"-ct{x}", f"--cache-type-{x}", f"type_{x}", type=click.Choice(KV_TYPES),
                 help=f"Type of the KV cache's {what}: f16 on a GPU, f32 on the CPU if not given.")
    for x, what in (("k", "keys"), ("v", "values"))
), title="Model")
device_options = grouped(
    place_options,
    click.option("--graph/--no-graph", default=None,
                 help="Replay each step as one graph (default on a GPU), or launch by launch."),
    click.option("--graph-mode", "mode", type=click.Choice(MODES),
                 help="How steps run: launch by launch, or a graph that is captured, built node by "
                      "node, cut in parts, or a whole answer in one launch."),
    click.option("--graph-prepare", "prepare", metavar="auto|lazy|LIST", default="auto",
                 show_default=True, callback=lambda *a: read_prepare(a[2]),
                 help="Which programs are made before the first token is computed: those that the "
                      "prompt needs, none, or those of steps of so many rows at the start of "
                      "a sequence, as in 1,8,512."),
    title="GPU and graphs",
)
load_options = grouped(
    click.option("-ub", "--ubatch-size", "n_ubatch", metavar="N", type=click.IntRange(min=1),
                 default=2048, show_default=True, envvar="LLAMAGRAPH_ARG_UBATCH",
                 help="Most tokens of the prompt that a step reads; 2048 is the largest step."),
    click.option("-b", "--batch-size", "n_batch", metavar="N", type=click.IntRange(min=1),
                 default=2048, show_default=True, envvar="LLAMAGRAPH_ARG_BATCH",
                 help="As -ub where it is smaller; there is one sequence alone."),
    click.option("-lm", "--load-mode", metavar="[auto|mmap]", default="auto",
                 callback=only("auto", "mmap", advice="files are always mapped into memory"),
                 help="Files are always mapped into memory."),
    click.option("--check-tensors", is_flag=True,
                 help="Refuse a model with numbers that are not finite; reads all of it first."),
    click.option("--override-kv", "overrides", multiple=True, type=OneText(),
                 metavar="KEY=TYPE:VALUE,...", callback=lambda *a: read_overrides(a[2]),
                 help="Metadata in place of the file's; types: int, float, bool, str."),
    click.option("--rope-scaling", type=click.Choice(["none", "linear", "yarn"]),
                 envvar="LLAMAGRAPH_ARG_ROPE_SCALING_TYPE",
                 help="How positions beyond the trained context are fitted in."),
    click.option("--rope-scale", metavar="N", type=click.FloatRange(min=0, min_open=True),
                 help="Contexts get longer by this factor."),
    click.option("--rope-freq-base", metavar="N", type=click.FloatRange(min=0, min_open=True),
                 help="Base of the rotary frequencies."),
    click.option("--rope-freq-scale", metavar="N", type=click.FloatRange(min=0, min_open=True),
                 help="The same as --rope-scale, as 1 / factor."),
    click.option("--yarn-orig-ctx", metavar="N", type=click.IntRange(min=0), default=0,
                 help="YaRN: the context of the original training; 0 as in the file."),
    click.option("--yarn-ext-factor", type=float, default=-1.0, metavar="X",
                 help="YaRN: share of frequencies that are kept; -1 as in the file, 0 for none."),
    click.option("--yarn-attn-factor", type=float, default=-1.0, metavar="X",
                 help="YaRN: factor of q and k beside its own; -1 as in the file."),
    click.option("--yarn-beta-slow", type=float, default=-1.0, metavar="X",
                 help="YaRN: turns below which a frequency is scaled in full; -1 as in the file."),
    click.option("--yarn-beta-fast", type=float, default=-1.0, metavar="X",
                 help="YaRN: turns above which it is kept; -1 as in the file."),
    title="Model",
)
run_options = grouped(
    click.option("-ngl", "--gpu-layers", "--n-gpu-layers", "n_gpu_layers", default="auto",
                 metavar="N", callback=lambda *a: read_layers(a[2]),
                 help="Layers on the GPU: 0 is the CPU; auto, all or all of them the GPU."),
    click.option("-fa", "--flash-attn", is_flag=False, flag_value="on", default="auto",
                 metavar="[on|auto]",
                 callback=only("on", "auto", advice="attention never writes its scores to memory"),
                 help="Attention is always flash attention."),
    click.option("-fit", "--fit", default="on", metavar="[on|off]",
                 callback=only("on", "off", advice="memory is always checked before loading"),
                 help="Memory is always checked before loading."),
    click.option("--warmup/--no-warmup", default=None,
                 help="Run an empty step first, so that timings have no loading of kernels in them "
                      "(default on a GPU)."),
    title="GPU and graphs",
)

def read_device(text: str) -> str:
    """llamagraph's name of a device: llama.cpp's CUDA0 is cuda:0, its none the CPU."""
    if "," in text:
        raise LineError(f"--device {text}: a model runs on one device; name one")
    match = DEVICE_NAME.fullmatch("cpu" if text.lower() == "none" else text)
    if match is None:
        return text  # the devices say what there is
    return match[1].lower() if match[1] else f"cuda:{match[2]}"


def read_layers(text: str) -> int | None:
    """The value of -ngl; None is all layers, on the best device that there is."""
    if text in ("auto", "all", "-1"):
        return None
    if not re.fullmatch(r"\d{1,9}", text):
        raise click.BadParameter(f"{text!r} is not a number, auto or all")
    return int(text)


def check_layers(n: int | None, n_layer: int) -> None:
    """LineError where -ngl asks for a model in two places."""
    if n and n < n_layer:
        raise LineError(f"-ngl {n}: a model of {n_layer} layers cannot be split between GPU and "
                        f"CPU yet; use -ngl 0 or -ngl all")


def read_overrides(texts: tuple[str, ...]) -> dict[str, Any]:
    """KEY=TYPE:VALUE,... as metadata."""
    kinds: dict[str, Callable[[str], Any]] = {
        "int": int, "float": float, "str": str, "bool": {"true": True, "false": False}.__getitem__,
    }
    found = {}
    for text in texts:
        for part in re.split(r",(?=[^,=]+=(?:int|float|bool|str):)", text):
            key, _, typed = part.partition("=")
            kind, _, value = typed.partition(":")
            try:
                found[key] = kinds[kind](value)
            except (ValueError, KeyError):
                raise click.BadParameter(f"{part!r} is not KEY=TYPE:VALUE, as in "
                                         "general.name=str:mine") from None
    return found


def metadata_overrides(options: dict[str, Any]) -> dict[str, Any]:
    """What --override-kv, --rope-* and --yarn-* put in place of a file's metadata."""
    if options["rope_scale"] and options["rope_freq_scale"]:
        raise click.UsageError("--rope-scale and --rope-freq-scale say the same; give one")
    factor = options["rope_scale"]
    if options["rope_freq_scale"]:
        factor = 1 / options["rope_freq_scale"]
    keys = {
        "scaling.type": options["rope_scaling"], "scaling.factor": factor,
        "freq_base": options["rope_freq_base"],
        "scaling.original_context_length": options["yarn_orig_ctx"] or None,
        "scaling.yarn_ext_factor": _unless_negative(options["yarn_ext_factor"]),
        "scaling.attn_factor": _unless_negative(options["yarn_attn_factor"]),
        "scaling.yarn_beta_slow": _unless_negative(options["yarn_beta_slow"]),
        "scaling.yarn_beta_fast": _unless_negative(options["yarn_beta_fast"]),
    }
    given = {f"{{arch}}.rope.{key}": value for key, value in keys.items() if value is not None}
    return given | options["overrides"]


def _unless_negative(value: float) -> float | None:
    return None if value < 0 else value


def read_prepare(text: str) -> list[int] | None:
    """Row counts, none of them for auto; None where programs are made at their first use."""
    if text in ("auto", "lazy"):
        return [] if text == "auto" else None
    if not re.fullmatch(r"\d{1,9}(,\d{1,9})*", text):
        raise click.BadParameter(f"{text!r} is not auto, lazy or row counts as in 1,8,512")
    return [int(n) for n in text.split(",")]


def chosen_mode(mode: str | None, graph: bool | None) -> str | None:
    """The executor that --graph-mode, --graph and --no-graph ask for."""
    if mode is not None and graph is not None and graph != (mode != "stream"):
        raise click.UsageError(f"--graph-mode {mode} contradicts --{'' if graph else 'no-'}graph")
    if mode is not None or graph is None:
        return mode
    return "capture" if graph else "stream"
