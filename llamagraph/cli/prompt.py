"""The prompt: where its text comes from, and how it becomes the tokens that a model reads."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import click

from llamagraph.cli.groups import LineError, OneText, grouped

# What a template is given by the conversation, not by the user.
OWN_VARIABLES = {"self", "messages", "chat_template", "add_generation_prompt", "strftime_now"}
ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "'": "'", '"': '"', "\\": "\\"}

prompt_options = grouped(
    click.option("-p", "--prompt", "option", metavar="TEXT", help="The prompt, as an option."),
    click.option("-f", "--file", type=click.Path(path_type=Path), metavar="FILE",
                 help="Read the prompt from a file."),
    click.option("-sys", "--system-prompt", "system", metavar="TEXT", help="The system message."),
    click.option("-sysf", "--system-prompt-file", "system_file", metavar="FILE",
                 type=click.Path(path_type=Path), help="Read the system message from a file."),
    click.option("-e", "--escape/--no-escape", default=True, show_default=True,
                 help=r"Take \n, \r, \t, \', \", \\ and \x41 in texts on the command line as what "
                      "they stand for; files and stdin are never changed."),
    click.option("-r", "--reverse-prompt", "stop", multiple=True, type=OneText(), metavar="TEXT",
                 help="End the answer before this text; may be given several times."),
    click.option("--in-prefix", default="", metavar="TEXT", help="Goes before the prompt's text."),
    click.option("--in-suffix", default="", metavar="TEXT", help="Goes behind it."),
    click.option("-cnv/-no-cnv", "--conversation/--no-conversation", default=None,
                 help="Put the prompt into the chat template (default where the model has one), or "
                      "continue it as raw text."),
    click.option("-st", "--single-turn", is_flag=True, help="One answer; so it is with a prompt."),
    click.option("--jinja/--no-jinja", default=True, callback=lambda *a: _jinja(a[2]),
                 help="Chat templates are always Jinja."),
    click.option("--chat-template", metavar="JINJA",
                 help="A template in place of the model's: its text, or the name of one of the "
                      "file's, or chatml."),
    click.option("--chat-template-file", type=click.Path(path_type=Path), metavar="FILE",
                 help="The same, read from a file."),
    click.option("--chat-template-kwargs", "template_kwargs", metavar="JSON", default="{}",
                 callback=lambda *a: read_variables(a[2]), help="Variables for the template."),
    click.option("-rea", "--reasoning", type=click.Choice(["on", "off", "auto"]), default="auto",
                 help="Whether the template is asked to let the model think; auto lets it."),
    click.option("--reasoning-budget", metavar="N", type=click.IntRange(min=-1), default=-1,
                 show_default=True, help="Most tokens of thinking: -1 any number, 0 none."),
    title="Prompt",
)


def _jinja(wanted: bool) -> bool:
    if not wanted:
        raise LineError("--no-jinja: there are no other templates; use --chat-template chatml, or "
                        "-no-cnv for none")
    return wanted


def read_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise click.BadParameter(f"is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise click.BadParameter(f'{text!r} is no JSON object, as in {{"name": 1}}')
    return value


def read_variables(text: str) -> dict[str, Any]:
    """A JSON object of variables that a template may be given."""
    found = read_object(text)
    if taken := sorted(OWN_VARIABLES & found.keys()):
        raise click.BadParameter(f"{taken[0]!r} cannot be given, the conversation sets it")
    return found


def unescape(text: str) -> str:
    r"""The text with \n and its like as what they stand for; other backslashes stay."""
    return re.sub(
        r"""\\(?:([nrt'"\\])|x([0-9a-fA-F]{2}))""",
        lambda m: ESCAPES[m[1]] if m[1] else chr(int(m[2], 16)), text,
    )


def read_text(file: Path) -> str:
    """A text file's contents, without the newline at its end; ClickException for what is none."""
    try:
        return file.read_text("utf-8").removesuffix("\n")
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a NUL in the name
        raise click.ClickException(f"{file}: cannot be read as text: {error}") from None


def _stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise click.ClickException(f"stdin: is not UTF-8 text: {error}") from None


def read_prompt(prompt: str | None, options: dict[str, Any], chats: bool = False) -> None:
    """Sets the texts among the options: `text`, `system`, `stop`, `template`.

    PROMPT, -p and -f are joined by lines; "-", or nothing on a pipe, is stdin. Where the user
    `chats` it is the first message, there may be none, and stdin holds the others.
    """
    plain = unescape if options["escape"] else str
    option, file = options["option"], options["file"]
    if prompt is None and option is None and file is None and not (
            chats or sys.stdin.isatty()):
        prompt = "-"
    texts = [_stdin() if p == "-" else plain(p) for p in (prompt, option) if p is not None]
    if file is not None:
        texts.append(read_text(file))
    text = "\n".join(t for t in texts if t)
    if not text and not chats:
        raise click.UsageError("no prompt: give PROMPT, -p, -f or text on stdin")
    options["in_prefix"], options["in_suffix"] = map(plain, (options["in_prefix"],
                                                             options["in_suffix"]))
    options["text"] = text if chats else options["in_prefix"] + text + options["in_suffix"]
    options["stop"] = tuple(map(plain, options["stop"]))
    options["dry_sequence_breakers"] = tuple(map(plain, options["dry_sequence_breakers"]))
    options["system"] = _either(options, "system", plain)
    options["template"] = _either(options, "chat_template", str)


def _either(options: dict[str, Any], name: str, plain: Any) -> str | None:
    """A text that is given as an option or in a file."""
    file = options[f"{name}_file"]
    if file is None:
        return None if options[name] is None else plain(options[name])
    if options[name] is not None:
        raise click.UsageError(f"a text and a file for {name.replace('_', ' ')}; give one")
    return read_text(file)


def prompt_tokens(tokenizer: Any, options: dict[str, Any]) -> list[int]:
    """What the model reads: one turn of a conversation, or raw text."""
    from llamagraph.chat import user_turn

    chat = options["conversation"]
    if chat is None:
        chat = tokenizer.has_chat_template or options["template"] is not None
    if not chat:
        return tokenizer.encode("\n".join(filter(None, (options["system"], options["text"]))))
    return user_turn(tokenizer, options["text"], options["system"], options["template"],
                     **template_variables(options))


def template_variables(options: dict[str, Any]) -> dict[str, Any]:
    """What a chat template is told."""
    thinks = options["reasoning"] != "off" and options["reasoning_budget"] != 0
    return {"enable_thinking": thinks, **options["template_kwargs"]}
