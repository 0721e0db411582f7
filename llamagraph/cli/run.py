"""llamagraph run: one answer, streamed to stdout, or a chat; facts go to stderr."""

import json
import sys
from pathlib import Path
from typing import Any

import click

from llamagraph.cli.answer import AnswerText, answer_arguments
from llamagraph.cli.chat_options import chat_options, is_chat, thinking_options
from llamagraph.cli.console import Notes, ProgressBar, end_stdout, wants_color
from llamagraph.cli.context_options import PromptCache, context_options
from llamagraph.cli.groups import GroupedCommand
from llamagraph.cli.lora import chosen_lora, lora_options
from llamagraph.cli.options import (
    check_layers,
    chosen_mode,
    device_options,
    kv_options,
    load_options,
    metadata_overrides,
    model_options,
    run_options,
    show_version,
)
from llamagraph.cli.prompt import prompt_options, prompt_tokens, read_prompt
from llamagraph.cli.report import (
    details,
    output_options,
    perf_lines,
    report,
    timing_lines,
    token_line,
)
from llamagraph.cli.sampling_options import (
    SAMPLING,
    chosen_sampling,
    grammar_options,
    read_grammar,
    sampling_options,
)
from llamagraph.cli.unsupported import refuse_unsupported


def _print_devices(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        from llamagraph.devices import list_devices

        for line in list_devices():
            click.echo(line)
        context.exit()


@click.command(cls=GroupedCommand)
@click.argument("prompt", required=False)
@model_options
@load_options
@kv_options
@lora_options
@context_options
@prompt_options
@chat_options
@sampling_options
@grammar_options
@output_options
@thinking_options
@device_options
@run_options
@click.option("--list-devices", is_flag=True, is_eager=True, expose_value=False,
              callback=_print_devices, help="List the devices and exit.")
@show_version
@click.help_option("--usage", hidden=True)
@refuse_unsupported
@click.pass_context
def run(context: click.Context, prompt: str | None, **options: Any) -> None:
    """Answer PROMPT ("-" is stdin). With no prompt, at a terminal, chat.

    Each option may also be set in the environment, --ctx-size as LLAMAGRAPH_ARG_CTX_SIZE.
    """
    if options["as_json"] and options["as_jsonl"]:
        raise click.UsageError("--json and --jsonl are two outputs; give one")
    if options["logprobs"] and not (options["as_json"] or options["as_jsonl"]):
        raise click.UsageError("--logprobs goes with --json or --jsonl")
    chats = is_chat(prompt, options)
    read_prompt(prompt, options, chats)
    options["rules"] = read_grammar(options)
    options["sampling"] = chosen_sampling(context, options)
    options["mode"] = chosen_mode(options["mode"], options["graph"])
    level = 9 if options["verbose"] else options["level"]
    with (Notes(level, options["log_file"], wants_color(options["log_colors"], sys.stderr)) as note,
          _open(options, note) as model):
        try:
            if chats:
                from llamagraph.cli.chat import chat

                chat(model, options, note, context.command.params)
            else:
                _answer(model, options, note)
        except BrokenPipeError:
            pass
        finally:
            end_stdout()


def _open(options: dict[str, Any], note: Notes) -> Any:
    """The model on its device; refuses what the options and the file say of each other."""
    from llamagraph import model as models
    from llamagraph.gguf import GGUFFile, check_tensors, default_model

    layers = options["n_gpu_layers"]
    with ProgressBar() as bar:
        file = GGUFFile(_model_file(options) or default_model(options["offline"], bar),
                        metadata_overrides(options))
        try:
            check_layers(layers, file.metadata.get(f"{file.architecture}.block_count", 0))
            if options["check_tensors"]:
                check_tensors(file, bar)
        except BaseException:
            file.close()
            raise
        model = models.open(
            file, device="cpu" if layers == 0 else options["device"], mode=options["mode"],
            n_ctx=options["n_ctx"] or None, n_threads=options["threads"],
            arch_tuning=options["arch_tuning"], progress=bar,
            n_ubatch=min(options["n_ubatch"], options["n_batch"]), warn=note.warn,
            l2_persist=options["l2_persist"],
            type_k=options["type_k"], type_v=options["type_v"], lora=chosen_lora(options),
        )
    if layers and not model.runner.device.target.is_cuda:
        note.warn(f"-ngl {layers}: there is no GPU; running on the CPU")
    return model


def _model_file(options: dict[str, Any]) -> Path | None:
    """The file that -m or -hf name; None is the default model."""
    if options["repo"] is None:
        if options["hf_file"] is not None:
            raise click.UsageError("--hf-file names a file of --hf-repo; give that too")
        return options["model"]
    if options["model"] is not None:
        raise click.UsageError("-m and -hf name two models; give one")
    from llamagraph.gguf.hub import hf_model

    return hf_model(options["repo"], options["hf_file"], offline=options["offline"])


def _answer(model: Any, options: dict[str, Any], note: Notes) -> None:
    prompt = prompt_tokens(model.tokenizer, options)
    answer = model.generate(prompt, **answer_arguments(model, options))
    if options["prepare"] is not None:
        answer.prepare(options["prepare"])
    is_text = not (options["as_json"] or options["as_jsonl"])
    if options["warmup"] or (options["warmup"] is None and model.runner.device.target.is_cuda):
        answer.warm_up()
    cache = PromptCache(model, answer, options, note)
    if options["display_prompt"] and is_text:
        color = wants_color(options["color"], sys.stdout)
        click.echo(click.style(options["text"], fg="yellow") if color else options["text"],
                   nl=False, color=color)
    interrupted = _stream(model, answer, options, note)
    if answer.stop_reason == "context":
        note.warn(f"[ the context of {model.runner.n_ctx} tokens is full: -c makes it larger, "
                  f"--context-shift goes on ]")
    if not is_text:
        click.echo(json.dumps(report(model, answer, SAMPLING), ensure_ascii=False))
    cache.finish()  # whatever becomes of the file, the answer is there
    for line in details(model):
        note.detail(line)
    if options["perf"]:
        for line in perf_lines(model, answer):
            note(line)
    if options["show_timings"]:
        for line in timing_lines(answer.timings):
            note(line)
    if interrupted:
        raise click.exceptions.Abort


def _stream(model: Any, answer: Any, options: dict[str, Any], note: Notes) -> bool:
    """Prints the answer as it comes; True where Ctrl-C ended it."""
    from llamagraph.text.thinking import ThinkingText

    is_text = not (options["as_json"] or options["as_jsonl"])
    thinking = ThinkingText(model.tokenizer, answer.prompt_tokens)
    writer = AnswerText(sys.stdout, wants_color(options["color"], sys.stdout),
                        options["fold_thinking"], note, thinking)
    interrupted = False  # Ctrl-C may come between a token and its printing
    try:
        for token in answer:
            if is_text:
                writer.write(token.text, thinking.feed(token.id, token.text))
            elif options["as_jsonl"]:
                line = json.dumps(token_line(model, token, answer), ensure_ascii=False)
                sys.stdout.write(line + "\n")
                sys.stdout.flush()
        writer.write("", thinking.flush())
    except KeyboardInterrupt:
        interrupted = True
        answer.stop_reason = "interrupted"
    if is_text:
        writer.end()
    return interrupted
