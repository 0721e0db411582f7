"""What a line that begins with / does in a chat. A command is a function and a row of the table."""

import os
import re
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from glob import escape, glob
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from llamagraph.cli.chat_settings import UNSET, change, current, listed, name_of, read_value
from llamagraph.cli.groups import LineError
from llamagraph.cli.prompt import read_text, unescape
from llamagraph.cli.report import details

if TYPE_CHECKING:
    from llamagraph.cli.chat import Chat


def leave(chat: "Chat", _: str) -> None:
    chat.leaves = True


def again(chat: "Chat", _: str) -> None:
    if current(chat.settable["temp"], chat.options, chat.model.sampling_defaults) <= 0:
        chat.say("[ at temp 0 the answer is the same; /set temp 0.8 lets it vary ]")
    chat.answer(chat.conversation.again())


def clear(chat: "Chat", _: str) -> None:
    chat.conversation.clear()
    chat.pending.clear()
    chat.say("[ a new conversation ]")


def read(chat: "Chat", argument: str) -> None:
    path = _file(argument, "/read FILE")
    text = read_text(path)
    if not text.strip():
        raise LineError(f"{path}: is empty")
    chat.pending.append(text)
    n = len(chat.model.tokenizer.encode(text, add_special=False))
    chat.say(f"[ {path}: {n} tokens; they go before your next message ]")


def save(chat: "Chat", argument: str) -> None:
    path = _file(argument, "/save FILE")
    chat.conversation.save(path)
    chat.say(f"[ {path}: {_messages(chat)} ]")


def load(chat: "Chat", argument: str) -> None:
    path = _file(argument, "/load FILE")
    chat.conversation.load(path)
    chat.options["system"] = chat.conversation.system
    chat.pending.clear()
    chat.say(f"[ {path}: {_messages(chat)} ]")
    for message in chat.conversation.messages[-2:]:
        text = " ".join(message["content"].split())
        chat.say(f"  {message['role']}: {text if len(text) <= 70 else text[:67] + ' ...'}")


def _messages(chat: "Chat") -> str:
    n = len(chat.conversation.messages)
    return f"{n} message" + "s" * (n != 1)


def set_option(chat: "Chat", argument: str) -> None:
    name, _, text = argument.strip().partition(" ")
    name, text = name.lstrip("-").replace("_", "-"), text.strip()
    if not name:
        for line in listed(chat.options, chat.model.sampling_defaults):
            chat.say(f"  {line}")
        return
    option = chat.settable.get(name)
    if option is None or option.name is None:
        raise LineError(f"/set {name}: there is no such option; Tab lists them")
    if not text:
        chat.say(f"  {name} {current(option, chat.options, chat.model.sampling_defaults)}")
        return
    plain = unescape if chat.options["escape"] else str
    value = read_value(option, text, plain)
    before = {**chat.options, "sampling": dict(chat.options["sampling"])}
    change(chat.options, option.name, value, text == UNSET)
    try:
        chat.apply()
    except Exception:
        chat.options.clear()
        chat.options.update(before)
        raise
    chat.say(f"  {name_of(option)} {text}")


def stats(chat: "Chat", _: str) -> None:
    c, runner = chat.conversation, chat.model.runner
    n = len(c.tokens) - c.n_dropped
    dropped = f", {c.n_dropped} older ones dropped" if c.n_dropped else ""
    rate = chat.n_generated / chat.seconds if chat.seconds else 0.0
    chat.say(f"[ {_messages(chat)}; {n} of {runner.n_ctx} tokens of the context used{dropped} ]")
    chat.say(f"[ {chat.n_generated} tokens generated in {chat.seconds:.1f} s, {rate:.1f} t/s; "
             f"{chat.n_read} read, {chat.n_reused} were there already ]")
    chat.say(f"[ {chat.model.path.name}, open for {time.monotonic() - chat.began:.0f} s ]")
    for line in details(chat.model):
        if not line.startswith("  program"):
            chat.say(f"  {line.strip()}")


def show_help(chat: "Chat", _: str) -> None:
    for name, command in COMMANDS.items():
        chat.say(f"  {f'{name} {command.argument}'.strip():18} {command.help}")
    for keys, text in chat.keys:
        chat.say(f"  {keys:18} {text}")


class Command(NamedTuple):
    """What it takes, what it is for, and the function that gets the rest of the line."""

    argument: str
    help: str
    run: Callable[["Chat", str], None]


COMMANDS: dict[str, Command] = {
    "/exit": Command("", "leave", leave),
    "/regen": Command("", "answer the last message once more, in another way", again),
    "/clear": Command("", "begin a new conversation; the system message stays", clear),
    "/read": Command("FILE", "put a text file before the next message", read),
    "/save": Command("FILE", "write the conversation to a file, as JSON", save),
    "/load": Command("FILE", "go on with a conversation from such a file", load),
    "/set": Command("OPTION VALUE", "change an option, as in /set temp 0.2; alone: list them",
                    set_option),
    "/stats": Command("", "tokens, speed and memory", stats),
    "/help": Command("", "this list", show_help),
}


def is_command(line: str) -> bool:
    """Whether a message is meant as a command: a path like /usr/bin is none, nor is " /exit"."""
    return re.match(r"/[a-z]*(\s|$)", line) is not None and "\n" not in line.strip()


def run_command(chat: "Chat", line: str) -> None:
    """Does it; LineError where there is no such command."""
    name, _, argument = line.strip().partition(" ")
    command = COMMANDS.get(name)
    if command is None:
        raise LineError(f"{name}: there is no such command; /help lists them")
    if argument.strip() and not command.argument:
        raise LineError(f"{name}: takes nothing after it")
    command.run(chat, argument)


def _file(argument: str, usage: str) -> Path:
    """A file name as a shell would read it: quotes and ~ count."""
    try:
        words = shlex.split(argument)
    except ValueError:
        words = [argument.strip()]
    if not words:
        raise LineError(f"{usage}: a file is missing")
    whole = words[0] if len(words) == 1 else argument.strip()
    return Path(os.path.expanduser(whole))


@dataclass
class Completion:
    """How the last word of a line may go on: commands, files, options, and their values."""

    options: dict[str, click.Option]

    def __call__(self, line: str) -> list[str]:
        if not line.startswith("/") or "\n" in line:
            return []
        words = line.split(" ")
        if len(words) == 1:
            return [f"{name} " if COMMANDS[name].argument else name
                    for name in COMMANDS if name.startswith(line)]
        if words[0] == "/set":
            return self._setting(words[1:])
        if words[0] in ("/read", "/save", "/load") and len(words) == 2:
            return _files(words[1])
        return []

    def _setting(self, words: list[str]) -> list[str]:
        if len(words) == 1:
            names = {name_of(option) for option in self.options.values()}
            return sorted(f"{name} " for name in names if name.startswith(words[0]))
        option = self.options.get(words[0])
        if option is None or len(words) > 2:
            return []
        values = ["on", "off"] if option.is_flag else list(getattr(option.type, "choices", ()))
        return [v for v in map(str, values) if v.startswith(words[1])]


def _files(start: str) -> list[str]:
    """Names that begin so, folders with a slash."""
    expanded = os.path.expanduser(start)
    found = sorted(glob(escape(expanded) + "*"))
    return [start + name[len(expanded) :] + "/" * os.path.isdir(name) for name in found]
