"""llamagraph run: one answer, streamed to stdout; facts go to stderr."""

import json
import sys
from pathlib import Path
from typing import Any

import click

from llamagraph.cli.console import ProgressBar, discard_stdout, note
from llamagraph.cli.options import (
    chosen_mode,
    device_options,
    grammar_options,
    model_options,
    read_grammar,
    read_text,
    sampling_options,
    show_version,
)

SAMPLING = ("seed", "temp", "top_k", "top_p", "min_p", "typical", "repeat_penalty",
            "repeat_last_n", "presence_penalty", "frequency_penalty", "logit_bias")


def _print_devices(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        from llamagraph.devices import list_devices

        for line in list_devices():
            click.echo(line)
        context.exit()


def _question(prompt: str | None, option: str | None, file: Path | None) -> str:
    """The prompt: PROMPT, -p and -f joined by lines; "-", or nothing on a pipe, is stdin."""
    if prompt is None and option is None and file is None and not sys.stdin.isatty():
        prompt = "-"
    texts = [_stdin() if p == "-" else p for p in (prompt, option) if p is not None]
    if file is not None:
        texts.append(read_text(file).removesuffix("\n"))
    text = "\n".join(t for t in texts if t)
    if not text:
        raise click.UsageError("no prompt: give PROMPT, -p, -f or text on stdin")
    return text


def _stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise click.ClickException(f"stdin: is not UTF-8 text: {error}") from None


@click.command()
@click.argument("prompt", required=False)
@click.option("-p", "--prompt", "option", metavar="TEXT", help="The prompt, as an option.")
@click.option("-f", "--file", type=click.Path(path_type=Path), help="Read the prompt from a file.")
@click.option("-sys", "--system-prompt", "system", metavar="TEXT", help="The system message.")
@click.option("-r", "--reverse-prompt", "stop", multiple=True, metavar="TEXT",
              help="End the answer before this text; may be given several times.")
@click.option("-n", "--predict", "limit", type=click.IntRange(min=-1), default=-1,
              help="Most tokens to generate; -1 goes on to the end.")
@click.option("-no-cnv", "--no-conversation", "raw", is_flag=True,
              help="Continue the prompt as raw text, without the chat template.")
@click.option("--display-prompt", is_flag=True, help="Echo the prompt before the answer.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
@click.option("--logprobs", type=click.IntRange(min=0), default=0, metavar="N",
              help="With --json: the N likeliest tokens of each step.")
@click.option("-v", "--verbose", is_flag=True, help="Say what runs where, on stderr.")
@click.option("--list-devices", is_flag=True, is_eager=True, expose_value=False,
              callback=_print_devices, help="List the devices and exit.")
@show_version
@model_options
@device_options
@sampling_options
@grammar_options
def run(prompt: str | None, option: str | None, file: Path | None, **options: Any) -> None:
    """Answer PROMPT ("-" is stdin)."""
    if options["logprobs"] and not options["as_json"]:
        raise click.UsageError("--logprobs goes with --json")
    options["rules"] = read_grammar(options)
    text = _question(prompt, option, file)
    mode = chosen_mode(options["mode"], options["graph"])
    from llamagraph import model as models

    with ProgressBar() as bar:
        model = models.open(_model_file(options, bar), device=options["device"], mode=mode,
                            n_ctx=options["n_ctx"] or None, n_threads=options["threads"],
                            offline=options["offline"], progress=bar, warn=note)
    with model:
        try:
            _answer(model, text, options)
        except BrokenPipeError:  # the reader has gone: a quiet end
            discard_stdout()


def _model_file(options: dict[str, Any], bar: ProgressBar) -> Path | None:
    """The file that -m or -hf name; None is the default model."""
    if options["repo"] is None:
        return options["model"]
    if options["model"] is not None:
        raise click.UsageError("-m and -hf name two models; give one")
    from llamagraph.gguf.hub import hf_model

    return hf_model(options["repo"], offline=options["offline"])


def _answer(model: Any, text: str, options: dict[str, Any]) -> None:
    from llamagraph.chat import user_turn

    if model.tokenizer.has_chat_template and not options["raw"]:
        prompt = user_turn(model.tokenizer, text, options["system"])
    else:
        prompt = model.tokenizer.encode("\n".join(filter(None, (options["system"], text))))
    rules = options["rules"]
    answer = model.generate(prompt, limit=options["limit"], ignore_eos=options["ignore_eos"],
                            logprobs=options["logprobs"], stop=options["stop"],
                            grammar=model.matcher(**rules) if rules else None,
                            **{name: options[name] for name in SAMPLING})
    if options["display_prompt"] and not options["as_json"]:
        click.echo(text, nl=False)
    interrupted = _stream(answer, silent=options["as_json"])
    if options["as_json"]:
        click.echo(json.dumps(_report(model, answer), ensure_ascii=False))
    if options["verbose"]:
        _explain(model)
    t = answer.timings
    note(f"[ prompt: {t.n_prompt} tokens, {t.prompt_tokens_per_second:.1f} t/s | generation: "
         f"{t.n_generated} tokens, {t.decode_tokens_per_second:.1f} t/s ]")
    if c := t.constraint:
        note(f"[ grammar: {c.n_rejected} of {c.n_tokens} tokens chosen again, "
             f"{c.us_per_token:.0f} us a token ]")
    if interrupted:
        raise click.exceptions.Abort


def _stream(answer: Any, silent: bool) -> bool:
    """Prints the answer as it comes; True where Ctrl-C ended it."""
    interrupted, written = False, ""  # Ctrl-C may come between a token and its printing
    try:
        for _, piece in answer:
            if not silent and piece:
                sys.stdout.write(piece)
                sys.stdout.flush()
                written = piece
    except KeyboardInterrupt:
        interrupted = True
        answer.stop_reason = "interrupted"
    if not silent and not written.endswith("\n"):
        click.echo()
    return interrupted


def _report(model: Any, answer: Any) -> dict[str, Any]:
    """The object that --json prints."""
    report = {
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
            **{name: getattr(answer.params, name) for name in SAMPLING},
        },
    }
    if answer.logprobs:
        report["logprobs"] = [
            [{"id": i, "text": model.tokenizer.decode([i]), "logprob": p} for i, p in step]
            for step in answer.logprobs
        ]
    return report


def _explain(model: Any) -> None:
    runner = model.runner
    note(f"device {runner.device.name}, target {runner.device.target.name}, mode {runner.mode}, "
         f"context {runner.n_ctx}")
    for arena, n_bytes in runner.device.memory.account().items():
        note(f"  {arena:10} {n_bytes / 1e6:10.1f} MB")
    for executor in runner.executors.values():
        key = executor.program.key
        note(f"  program rows={key.rows} logits={key.logits} attention={key.attention} "
             f"sampler={key.sampler}: {len(executor.program.launches)} launches, "
             f"{executor.updates} updates")
