"""Options of a chat, and whether there is one: with no prompt at a terminal, or asked for by -i."""

import sys
from typing import Any

import click

from llamagraph.cli.groups import grouped

chat_options = grouped(
    click.option("-i", "-if", "--interactive", "--interactive-first", "interactive", is_flag=True,
                 help="Chat also where there is a prompt, or lines on a pipe; with -no-cnv, write "
                      "on in turn with the model."),
    click.option("-mli", "--multiline-input", is_flag=True,
                 help=r"Enter begins a new line, and a \ at a line's end sends the message; "
                      r"without it Enter sends and a \ begins a new line."),
    title="Prompt",
)
thinking_options = grouped(
    click.option("--fold-thinking/--no-fold-thinking", default=False, show_default=True,
                 help="Show how long a model has thought in place of its thoughts."),
    title="Output",
)


def is_chat(prompt: str | None, options: dict[str, Any]) -> bool:
    """Whether to talk in turns; a UsageError where an option is for one answer alone."""
    nothing = prompt is None and options["option"] is None and options["file"] is None
    at_terminal = nothing and sys.stdin.isatty() and options["conversation"] is not False
    if not (options["interactive"] or at_terminal):
        return False
    for name, option in (("as_json", "--json"), ("as_jsonl", "--jsonl")):
        if options[name]:
            raise click.UsageError(f"{option} is for one answer; give a prompt, and no -i")
    return True
