"""llamagraph bench: how fast a model runs here, by graph mode. Options and formats of llama-bench.

A table, CSV, JSON or SQL on stdout, and another one on stderr where that is wanted.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import click

from llamagraph.cli.console import ProgressBar, end_stdout, note, write_page
from llamagraph.cli.numbers import Number, numbers_option, read_pairs, words_option
from llamagraph.cli.options import KV_TYPES, MODES, arch_tuning, persist_option, show_version
from llamagraph.cli.unsupported import UNSUPPORTED_IN_BENCH, refuse

FORMATS = ["csv", "json", "jsonl", "md", "sql"]
FLASH_ATTENTION = {"auto": -1, "-1": -1, "on": 1, "1": 1, "off": 0, "0": 0}


class Place(NamedTuple):
    """Where a model runs, and in what its KV cache is kept."""

    device: str
    n_threads: int | None
    type_k: str | None
    type_v: str | None


class Plan(NamedTuple):
    """What is measured where -p, -n, -r and --graph-mode do not say it."""

    n_prompt: Sequence[int]
    n_gen: Sequence[int]
    repetitions: int
    modes: Sequence[str]


GPU_PLAN = Plan([512], [128], 5, ["stream", "capture"])
CPU_PLAN = Plan([64], [16], 2, ["stream"])  # numpy is slower by orders of magnitude


@click.command()
@words_option("-m", "--model", "models", metavar="FILE,...",
              help="GGUF model files. Without any model the default one is fetched once.")
@words_option("-hf", "--hf-repo", "repos", metavar="USER/MODEL[:QUANT],...",
              help="Fetch models from Hugging Face, once.")
@words_option("--synthetic", metavar="SHAPE:QUANT,...",
              help="Random weights in real models' shapes instead of files, as in 8b:q4_k_m; "
                   "shapes: 135m, 1b, 8b, 70b.")
@numbers_option("-p", "--n-prompt", help="Prompt lengths (512; on a CPU 64); 0 for none. "
                                         "Lists: 1,2,4; ranges: 0-8192+4096, 1-8*2.")
@numbers_option("-n", "--n-gen", help="Tokens to decode (128; on a CPU 16); 0 for none.")
@click.option("-pg", "pairs", multiple=True, metavar="P,N", callback=lambda *a: read_pairs(a[2]),
              help="A prompt and tokens after it, measured together.")
@numbers_option("-d", "--n-depth", help="Positions that are in the KV cache before (0).")
@numbers_option("-b", "--batch-size", "n_batch", least=1,
                help="Tokens of a prompt that are given at once (2048).")
@numbers_option("-ub", "--ubatch-size", "n_ubatch", least=1,
                help="Rows of a step at most (2048).")
@words_option("-ctk", "--cache-type-k", "type_k", metavar="TYPE,...", known=KV_TYPES,
              help=f"Types of the KV cache's keys: {', '.join(KV_TYPES)} (f16; on a CPU f32).")
@words_option("-ctv", "--cache-type-v", "type_v", metavar="TYPE,...", known=KV_TYPES,
              help="Types of its values.")
@words_option("-fa", "--flash-attn", metavar="on|auto", known=list(FLASH_ATTENTION),
              help="Fused attention, which is always on.")
@numbers_option("-t", "--threads", least=1, help="CPU threads.")
@click.option("-r", "--repetitions", type=click.IntRange(min=1),
              help="Measurements of each case (5; on a CPU 2).")
@click.option("--delay", type=Number(0, 3600), default=0, metavar="SECONDS",
              help="Wait before each case.")
@words_option("--graph-mode", "modes", metavar="MODE,...", known=MODES,
              help=f"Some of {', '.join(MODES)} (stream,capture; on a CPU stream).")
@words_option("-dev", "--device", "devices", metavar="NAME,...",
              help="Where to run: auto, cpu, cuda, or cuda:1 for the second GPU.")
@persist_option
@arch_tuning
@click.option("-c", "--ctx-size", "n_ctx", type=click.IntRange(min=0), default=0,
              help="Longest sequence in tokens; 0 takes what the cases need.")
@click.option("-o", "--output", type=click.Choice(FORMATS), default="md", show_default=True,
              help="What stdout is.")
@click.option("-oe", "--output-err", type=click.Choice(FORMATS), help="The same on stderr.")
@click.option("--compare", is_flag=True,
              help="Decode in every mode in turn: where a token's time goes, and which to use.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="With --compare: the same as a page with plots; also times every launch.")
@click.option("--progress", is_flag=True, help="Say on stderr which case begins.")
@click.option("--no-warmup", is_flag=True, help="Measure from the first run on.")
@click.option("--offline", is_flag=True, help="Never fetch anything.")
@show_version
@refuse(UNSUPPORTED_IN_BENCH)
def bench(**options: Any) -> None:
    """Measure prompt and decode speed by graph mode, against what memory allows."""
    _check(options)
    found: list[list[Any]] = []  # the comparisons, a list a model and place
    _print(_results(options, found), options, found)
    if options["html"]:
        from llamagraph.bench_page import page

        title = f"Do CUDA graphs pay? {found[0][0].stream.gpu_info}".strip()
        write_page(options["html"], page(found, title))


def _check(options: dict[str, Any]) -> None:
    """What cannot be measured: one line, before anything is loaded."""
    from llamagraph.planner import ROW_BUCKETS

    largest = ROW_BUCKETS[-1]
    if options["html"] and not options["compare"]:
        raise click.UsageError("--html draws what --compare measures; give both")
    if options["html"] and not options["html"].absolute().parent.is_dir():
        raise click.UsageError(f"--html {options['html']}: there is no such folder")
    if options["compare"] and (options["n_prompt"] or options["pairs"]):
        raise click.UsageError("--compare measures decode steps: leave out -p and -pg")
    if any(FLASH_ATTENTION[fa] == 0 for fa in options["flash_attn"]):
        raise click.UsageError("-fa off: attention is always fused; leave it out, or -fa on")
    if (n := max(options["n_ubatch"], default=1)) > largest:
        raise click.UsageError(f"-ub {n}: a step has {largest} rows at most")
    for n_batch, n_ubatch in _batches(options):
        if n_batch > n_ubatch and n_batch % n_ubatch:
            raise click.UsageError(f"-b {n_batch}: prompts are cut by -ub alone; give a multiple "
                                   f"of -ub {n_ubatch}")


def _batches(options: dict[str, Any]) -> list[tuple[int, int]]:
    """The pairs of -b and -ub; a step has no more rows than the smaller one."""
    from llamagraph.bench_result import N_BATCH
    from llamagraph.planner import ROW_BUCKETS

    return [(b, min(b, ub)) for b, ub in product(options["n_batch"] or [N_BATCH],
                                                 options["n_ubatch"] or [ROW_BUCKETS[-1]])]


def _results(options: dict[str, Any], found: list[list[Any]]) -> Iterator[Any]:
    """The results of all models on all devices, as they come; comparisons also go to `found`."""
    models = [*_models(options)]
    places = [Place(*place) for place in product(
        options["devices"] or ["auto"], options["threads"] or [None], options["type_k"] or [None],
        options["type_v"] or [None])]
    for i, (model, place) in enumerate(product(models, places)):
        with ExitStack() as opened:
            file = opened.enter_context(open_file(*model, options["offline"]))
            device = _open_device(place, options)
            opened.callback(device.close)
            cases, plan = _cases(options, device)
            step = _Announced(options, i * len(cases), len(cases) * len(models) * len(places))
            bar = opened.enter_context(ProgressBar())
            yield from _bench(file, device, cases, plan, options, step, bar, place, found)


def _models(options: dict[str, Any]) -> Iterator[tuple[Path | None, str | None]]:
    """The models, each as its file or as what is to be synthesised; the default one has neither."""
    from llamagraph.gguf.hub import hf_model

    yield from ((Path(name), None) for name in options["models"])
    yield from ((hf_model(name, offline=options["offline"]), None) for name in options["repos"])
    yield from ((None, spec) for spec in options["synthetic"])
    if not (options["models"] or options["repos"] or options["synthetic"]):
        yield None, None


def open_file(model: Path | None, synthetic: str | None, offline: bool) -> Any:
    """The file, or what a synthetic model's would be; with neither, that of the default model."""
    if synthetic is not None:
        from llamagraph.gguf.synthetic import SyntheticFile

        return SyntheticFile(synthetic)
    from llamagraph.gguf import GGUFFile, default_model

    with ProgressBar() as bar:
        return GGUFFile(model or default_model(offline, bar))


def _open_device(place: Place, options: dict[str, Any]) -> Any:
    from llamagraph.devices import open_device

    return open_device(place.device, n_threads=place.n_threads, warn=note,
                       persist=options["l2_persist"] == "auto", arch_tuning=options["arch_tuning"])


def _cases(options: dict[str, Any], device: Any) -> tuple[list[Any], Plan]:
    """The cases on that device, and its plan."""
    from llamagraph import bench_result

    plan = GPU_PLAN if device.target.is_cuda else CPU_PLAN
    plan = Plan(*(options[name] or default for name, default in plan._asdict().items()))
    if options["compare"]:
        modes = dict.fromkeys(["stream", *(options["modes"] or MODES)])
        plan = plan._replace(n_prompt=[], modes=list(modes))
    flash = [FLASH_ATTENTION[fa] for fa in options["flash_attn"]] or [-1]
    cases = [
        case for (n_batch, n_ubatch), fa in product(_batches(options), flash)
        for case in bench_result.cases_of(plan.n_prompt, plan.n_gen, options["pairs"],
                                          options["n_depth"] or [0], n_batch=n_batch,
                                          n_ubatch=n_ubatch, flash_attn=fa)
    ]
    if not cases:
        raise click.UsageError("nothing to measure: -p and -n are 0")
    return cases, plan


class _Announced:
    """Waits and says so before a case: --delay and --progress."""

    def __init__(self, options: dict[str, Any], done: int, total: int):
        self._options, self._done, self._total = options, done, total

    def __call__(self, case: Any) -> None:
        self._done += 1
        if self._options["progress"]:
            note(f"llamagraph bench: {self._done}/{self._total}: {case.name}")
        time.sleep(self._options["delay"])


def _bench(file: Any, device: Any, cases: Sequence[Any], plan: Plan, options: dict[str, Any],
           before: _Announced, bar: ProgressBar, place: Place, found: list[list[Any]]
           ) -> Iterator[Any]:
    from llamagraph.bench import bench
    from llamagraph.bench_anatomy import comparisons

    def compared(*arguments: Any, **keywords: Any) -> Iterator[Any]:
        found.append([])
        for c in comparisons(*arguments, timeline=bool(options["html"]), **keywords):
            found[-1].append(c)
            yield from c.rows

    asked = {"n_threads": getattr(device, "n_threads", None) or 1, "devices": place.device}
    results = (compared if options["compare"] else bench)(
        file, device, cases, plan.modes, plan.repetitions, before=before, asked=asked,
        warmup=not options["no_warmup"], n_ctx=options["n_ctx"] or None, type_k=place.type_k,
        type_v=place.type_v, progress=bar, warn=note)
    for i, result in enumerate(results):
        if i == 0:
            bar.close()
            note(f"{result.gpu_info or result.cpu_info}: reads {result.read_gb_per_s:.1f} GB/s, "
                 f"multiplies {result.peak_tflops:.3g} TFLOP/s")
        yield result


def _print(results: Iterator[Any], options: dict[str, Any], found: list[list[Any]]) -> None:
    """Every format's text as the results come, and what comparisons say."""
    from llamagraph.bench_report import FORMATS, LLAMA_BENCH, PARAMETERS, Comparative

    kinds = {**FORMATS, "md": Comparative} if options["compare"] else FORMATS
    flash = [FLASH_ATTENTION[fa] for fa in options["flash_attn"]]
    given = {**options, "n_threads": options["threads"], "flash_attn": flash}
    shown = [name for name in PARAMETERS if given.get(name) not in (None, [], [LLAMA_BENCH[name]])]
    outputs = [(kinds[options["output"]](shown), False)]
    if options["output_err"]:
        outputs.append((kinds[options["output_err"]](shown), True))
    result = None
    try:
        for following in results:
            for form, err in outputs:
                text = form.row(following) if result else form.head(following) + form.row(following)
                click.echo(text, nl=False, err=err)
            result = following
        _print_verdicts(found, err=options["output"] != "md")
        for form, err in outputs:
            click.echo(form.foot(result), nl=False, err=err)
    except BrokenPipeError:
        end_stdout()


def _print_verdicts(found: list[list[Any]], err: bool) -> None:
    """What the comparisons of each model say; beside a table, else on stderr."""
    from llamagraph.bench_compare import verdict

    for comparisons in found:
        name = comparisons[0].stream.model_type
        click.echo("\n" + "\n".join([f"{name}:", *verdict(comparisons)]), err=err)
