"""What a run says besides its answer: options for it, the JSON object, timings and details."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from llamagraph.cli.groups import grouped

CHOICES = click.Choice(["on", "off", "auto"])

output_options = grouped(
    click.option("-n", "--predict", "--n-predict", "limit", metavar="N",
                 type=click.IntRange(min=-2), default=-1, show_default=True,
                 help="Most tokens to generate; -1 goes on to the end, or to that of the context."),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text."),
    click.option("--jsonl", "as_jsonl", is_flag=True,
                 help="Print a line of JSON a token as it comes, then the object of --json."),
    click.option("--logprobs", type=click.IntRange(min=0), default=0, metavar="N",
                 help="With --json or --jsonl: the N likeliest tokens of each step."),
    click.option("--display-prompt/--no-display-prompt", default=False, show_default=True,
                 help="Echo the prompt before the answer."),
    click.option("-sp", "--special", is_flag=True, help="Show special tokens as their texts."),
    click.option("-co", "--color", is_flag=False, flag_value="on", type=CHOICES, default="auto",
                 metavar="[on|off|auto]", help="Colour an echoed prompt; auto does on a terminal."),
    click.option("--simple-io", is_flag=True, help="Output is always simple."),
    click.option("-v", "--verbose", "--log-verbose", is_flag=True,
                 help="Say what runs where, on stderr."),
    click.option("-lv", "--verbosity", "--log-verbosity", "level", metavar="N",
                 type=click.IntRange(0, 9), default=3, show_default=True,
                 help="What stderr says: 1 errors, 2 warnings, 3 timings, 4 all."),
    click.option("--log-file", type=click.Path(path_type=Path), metavar="FILE",
                 help="Write what stderr says to a file too."),
    click.option("--log-colors", is_flag=False, flag_value="on", type=CHOICES, default="auto",
                 metavar="[on|off|auto]", help="Dim it; auto does on a terminal."),
    click.option("--show-timings/--no-show-timings", default=True, show_default=True,
                 help="End with a line of timings on stderr."),
    click.option("--perf/--no-perf", default=False, show_default=True,
                 help="Say where the time went, line by line."),
    title="Output",
)


def token_line(model: Any, token: Any, answer: Any) -> dict[str, Any]:
    """A token as --jsonl prints it."""
    line = {"id": token.id, "text": token.text}
    if answer.logprobs:
        line["logprobs"] = _likeliest(model, answer.logprobs[-1])
    return line


def _likeliest(model: Any, step: list[tuple[int, float]]) -> list[dict[str, Any]]:
    return [{"id": i, "text": model.tokenizer.decode([i]), "logprob": p} for i, p in step]


def report(model: Any, answer: Any, settings: tuple[str, ...]) -> dict[str, Any]:
    """The object that --json prints; `settings` are the sampling parameters in it."""
    found = {
        "text": answer.text,
        "tokens": answer.tokens,
        "prompt_tokens": answer.prompt_tokens,
        "stop_reason": answer.stop_reason,
        "timings": answer.timings.as_dict(),
        "settings": {
            "model": str(model.path),
            "device": model.runner.device.name,
            "graph_mode": model.runner.mode,
            "n_ctx": model.runner.n_ctx,
            "lora": model.adapters,
            **{name: getattr(answer.params, name) for name in settings},
        },
    }
    if answer.logprobs:
        found["logprobs"] = [_likeliest(model, step) for step in answer.logprobs]
    return found


def timing_lines(t: Any) -> Iterator[str]:
    known = f" and {t.n_reused} known" if t.n_reused else ""
    yield (f"[ prompt: {t.n_prompt} tokens{known}, {t.prompt_tokens_per_second:.1f} t/s | "
           f"generation: {t.n_generated} tokens, {t.decode_tokens_per_second:.1f} t/s ]")
    if c := t.constraint:
        yield (f"[ grammar: {c.n_rejected} of {c.n_tokens} tokens chosen again, "
               f"{c.us_per_token:.0f} us a token ]")


def perf_lines(model: Any, answer: Any) -> Iterator[str]:
    """Where the time went, under llama.cpp's names; what the graphs did."""
    t, runner = answer.timings, model.runner
    n_runs = max(0, t.n_generated - 1)
    parts = (("prompt eval time", t.first_token_seconds, t.n_prompt, "tokens"),
             ("eval time", max(0.0, t.seconds - t.first_token_seconds), n_runs, "runs"))
    yield f"{'load time':>16} = {1e3 * t.load_seconds:10.2f} ms"
    for name, seconds, n, unit in parts:
        each, rate = (1e3 * seconds / n, n / seconds) if n and seconds else (0.0, 0.0)
        yield (f"{name:>16} = {1e3 * seconds:10.2f} ms / {n:5} {unit} "
               f"({each:.2f} ms each, {rate:.2f} per second)")
    yield f"{'total time':>16} = {1e3 * (t.load_seconds + t.seconds):10.2f} ms"
    sampler = "host" if t.constraint else answer.params.sampler(runner.device.target,
                                                                runner.n_vocab)
    updates = sum(executor.updates for executor in runner.executors.values())
    yield (f"{'steps':>16} = mode {runner.mode}, {len(list(runner.executors.values()))} programs, "
           f"{updates} updates; tokens chosen by {sampler}")


def _adapters(key: Any) -> str:
    return f" adapters={','.join(key.adapters)}" if key.adapters else ""


def details(model: Any) -> Iterator[str]:
    """What runs where."""
    runner = model.runner
    yield (f"device {runner.device.name}, target {runner.device.target.name}, mode {runner.mode}, "
           f"context {runner.n_ctx}")
    for arena, n_bytes in runner.device.memory.account().items():
        yield f"  {arena:10} {n_bytes / 1e6:10.1f} MB"
    for executor in runner.executors.values():
        key = executor.program.key
        yield (f"  program rows={key.rows} logits={key.logits} attention={key.attention} "
               f"sampler={key.sampler}{_adapters(key)}: {len(executor.program.launches)} launches, "
               f"{executor.n_nodes} nodes, {executor.size() / 1e3:.0f} kB, made in "
               f"{1e3 * executor.prepare_seconds:.1f} ms, {executor.updates} updates")
