"""A chat: messages in, answers out, turn by turn, at a terminal or on a pipe.

The answer goes to stdout and all else to stderr. Ctrl-C stops an answer; what was written of it
stays. Knows no kernel and no file format.
"""

import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, TextIO

import click

from llamagraph.cli.answer import AnswerText, answer_arguments
from llamagraph.cli.chat_commands import Completion, is_command, run_command
from llamagraph.cli.chat_input import Input, open_input, terminal_as_before
from llamagraph.cli.chat_settings import settable
from llamagraph.cli.console import wants_color
from llamagraph.cli.context_options import PromptCache
from llamagraph.cli.prompt import template_variables
from llamagraph.cli.report import perf_lines, timing_lines
from llamagraph.cli.sampling_options import read_grammar
from llamagraph.conversation import Conversation, Turn
from llamagraph.errors import DeviceError, LlamaGraphError

KEYS = (("Ctrl-C", "stop the answer; at the prompt: clear the line, then leave"),
        ("Ctrl-D", "leave"))
ENTER = ("\\ Enter", "a new line; Enter alone sends")
MANY = ("\\ Enter", "send; Enter alone begins a new line")


class StopKey:
    """Ctrl-C while an answer is written: the first asks it to stop, the second leaves."""

    def __init__(self) -> None:
        self.asked = self.leaves = False

    def __enter__(self) -> "StopKey":
        self.asked = self.leaves = False
        self._before = signal.signal(signal.SIGINT, self._pressed)
        return self

    def _pressed(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            self.leaves = True
            raise KeyboardInterrupt
        self.asked = True

    def check(self) -> None:
        """Raises KeyboardInterrupt where it was pressed; called where a step can be left out."""
        if self.asked:
            raise KeyboardInterrupt

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)


class Reading:
    """How far a long prompt has been read: a line at a terminal that goes when the answer comes."""

    def __init__(self, turn: Turn):
        self._answer, self._runner = turn.answer, turn.conversation.model.runner
        self._least = 4096 if self._runner.device.target.is_cuda else 64  # tokens of a second or so
        self._shown = ""

    def step(self) -> None:
        t = self._answer.timings
        if not t.n_generated and t.n_prompt >= self._least and sys.stderr.isatty():
            n = self._runner.n_past - t.n_reused
            self._shown = f"[ reading: {n} of {t.n_prompt} tokens ]"
            click.echo(f"\r{self._shown}", nl=False, err=True)

    def end(self) -> None:
        if self._shown:
            click.echo(f"\r{' ' * len(self._shown)}\r", nl=False, err=True)
            self._shown = ""


class Chat:
    """The turns of one conversation. `options` are those of a run, `note` hears facts."""

    def __init__(self, conversation: Conversation, source: Input, options: dict[str, Any],
                 note: Callable[..., None], out: TextIO, settable: dict[str, click.Option]):
        self.conversation, self.source, self.note, self.out = conversation, source, note, out
        self.options, self.settable = options, settable
        self.model = conversation.model
        self.pending: list[str] = []  # texts of /read, for the next message
        self.leaves = False
        self.began = time.monotonic()
        self.n_read = self.n_reused = self.n_generated = 0
        self.seconds = 0.0
        self.keys = (*KEYS, MANY if options["multiline_input"] else ENTER)
        self._n_dropped = 0
        self._cache = None if options["prompt_cache"] else PromptCache(
            self.model, None, options, note)
        self._opens_cache = False  # what is wrong with its file ends the chat
        self._stop = StopKey()
        self.apply()

    def say(self, text: str) -> None:
        """A line that the user has asked for, on stderr."""
        self.out.flush()
        click.echo(text, err=True)

    def apply(self) -> None:
        """Takes the options over; LlamaGraphError or ClickException for what cannot be."""
        options = {**self.options, "rules": read_grammar(self.options)}
        arguments = answer_arguments(self.model, options)
        self.model.generate([0], **arguments)  # nothing runs: it says what cannot be
        self.conversation.settings = arguments
        self.conversation.system = options["system"]
        self.conversation.variables = template_variables(options)

    def run(self, first: str = "") -> None:
        """Turns until the end of the input, /exit, or the first answer of a single turn."""
        if first:
            self._take_message(first, typed=False)
        while not (self.leaves or (self.options["single_turn"] and self.conversation.messages)):
            try:
                line = self.source.read()
            except EOFError:
                break
            self._take_message(line)
        if self._cache:
            self._cache.finish()

    def _take_message(self, line: str, typed: bool = True) -> None:
        """A command, or a turn; what goes wrong is one line, and the chat goes on."""
        try:
            if typed and is_command(line):
                run_command(self, line)
            elif line.strip() or self.conversation.raw or self.pending:
                turn = self.conversation.ask(self._message(line, typed))
                self.answer(turn)
                if not turn.taken_back:
                    self.pending.clear()
        except LlamaGraphError as error:
            if isinstance(error, DeviceError) or self._opens_cache:
                raise
            self.say(f"Error: {error}")
        except click.ClickException as error:
            self.say(f"Error: {error.format_message()}")

    def _message(self, line: str, typed: bool) -> str:
        """What the model gets; nothing where raw text is to go on by itself."""
        text = "\n\n".join([*self.pending, *([line] if line.strip() else [])])
        if self.conversation.raw:
            text += "\n" if typed and text else ""
            return self.options["in_prefix"] + text + self.options["in_suffix"] if text else ""
        return self.options["in_prefix"] + text + self.options["in_suffix"]

    def answer(self, turn: Turn) -> None:
        """Writes an answer, and what it cost."""
        color = wants_color(self.options["color"], self.out)
        writer = AnswerText(self.out, color, self.options["fold_thinking"], self.note,
                            turn.thinking)
        if self._cache is None:
            self._opens_cache = True
            self._cache = PromptCache(self.model, turn.answer, self.options, self.note)
            self._opens_cache = False
        try:
            with self._stop, self.source.quiet():
                self._write(turn, writer)
        except KeyboardInterrupt:
            if self._stop.leaves:
                writer.end()
                raise
        if turn.taken_back:
            self.say("[ stopped; the message is taken back ]")
            return
        writer.end()
        if self._stop.asked:
            self.note("[ stopped ]")
        self._report(turn)

    def _write(self, turn: Turn, writer: AnswerText) -> None:
        """The tokens as they come; KeyboardInterrupt where they are to stop."""
        reading, runner = Reading(turn), self.model.runner

        def before_step() -> None:
            self._stop.check()
            reading.step()

        runner.before_step = before_step
        try:
            for token, pieces in turn:
                reading.end()
                writer.write(token.text, pieces)
                self._stop.check()
        finally:
            reading.end()
            runner.before_step = lambda: None

    def _report(self, turn: Turn) -> None:
        t = turn.answer.timings
        self.n_read, self.n_reused = self.n_read + t.n_prompt, self.n_reused + t.n_reused
        self.n_generated, self.seconds = self.n_generated + t.n_generated, self.seconds + t.seconds
        lines = list(timing_lines(t)) if self.options["show_timings"] else []
        for line in [*(perf_lines(self.model, turn.answer) if self.options["perf"] else ()),
                     *lines]:
            self.note(line)
        self._say_of_context(turn)

    def _say_of_context(self, turn: Turn) -> None:
        n, n_ctx = self.conversation.n_dropped, self.model.runner.n_ctx
        if n > self._n_dropped:
            self.note(f"[ the context of {n_ctx} was full: {n - self._n_dropped} tokens dropped ]")
        self._n_dropped = n
        if turn.answer.stop_reason == "context":
            self.say(f"[ the context of {n_ctx} tokens is full: /clear begins anew, /set "
                     f"context-shift on drops the oldest, -c makes it larger ]")


def chat(model: Any, options: dict[str, Any], note: Any, params: list[click.Parameter]) -> None:
    """A whole chat, at a terminal or on a pipe; Abort where Ctrl-C has ended it."""
    conversation = Conversation(model, template=options["template"], raw=_is_raw(model, options))
    known = settable(params)
    color = wants_color(options["color"], sys.stdout) and not options["simple_io"]
    source = open_input(Completion(known), options["multiline_input"], options["simple_io"], color)
    talk = Chat(conversation, source, options, note, sys.stdout, known)
    _prepare(model.generate([0] * 8, **conversation.settings), options)
    if sys.stdin.isatty():
        note(f"[ {model.path.name} on {model.runner.device.name}, context {model.runner.n_ctx}; "
             f"/help lists commands, Ctrl-D leaves ]")
    if conversation.raw and options["conversation"] is None:
        note("[ the file has no chat template: text goes on as it is; -cnv takes ChatML ]")
    if sys.stdin.isatty() and options["text"]:
        talk.say(f"> {options['text']}")
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        with terminal_as_before():
            talk.run(options["text"])
    except KeyboardInterrupt:
        raise click.exceptions.Abort from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _prepare(answer: Any, options: dict[str, Any]) -> None:
    """Makes programs before the first message, as --graph-prepare and --warmup say."""
    if options["prepare"] is not None:
        answer.prepare(options["prepare"])
    is_cuda = answer.model.runner.device.target.is_cuda
    if options["warmup"] or (options["warmup"] is None and is_cuda):
        answer.warm_up()


def _leave(number: int, frame: FrameType | None) -> None:
    """Ends in an orderly way: the terminal is then as before."""
    sys.exit(128 + number)


def _is_raw(model: Any, options: dict[str, Any]) -> bool:
    if options["conversation"] is not None:
        return not options["conversation"]
    return not model.tokenizer.has_chat_template and options["template"] is None
