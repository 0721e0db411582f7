r"""Where a chat's messages come from: an editor at a terminal, or plain lines.

A message is a line; a \ at its end goes on in the next one. With `multiline` it is the other way
round: lines go on, and a \ sends them. A line that begins with / is complete by itself. Reading
raises EOFError at the end (Ctrl-D) and KeyboardInterrupt for Ctrl-C. Knows no command.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from importlib.util import find_spec
from typing import Any, Protocol, TextIO

PROMPT, GOES_ON = "> ", "  "
Complete = Callable[[str], list[str]]  # the last word of a line, in all ways that it may go on
COLOR, RESET = "\x1b[1;32m", "\x1b[0m"


class Input(Protocol):
    """What a chat needs of it: a message, and quiet while an answer is written."""

    def read(self) -> str: ...

    def quiet(self) -> AbstractContextManager[object]: ...


def read_message(read_line: Callable[[str], str], multiline: bool) -> str:
    """A message of lines; its end is the end of the text where there was some."""
    lines: list[str] = []
    while True:
        try:
            line = read_line(GOES_ON if lines else PROMPT)
        except EOFError:
            if lines:
                return "\n".join(lines)
            raise
        marked = line.endswith("\\")
        lines.append(line.removesuffix("\\"))
        if marked == multiline or (len(lines) == 1 and line.startswith("/")):
            return "\n".join(lines)


@contextmanager
def terminal_as_before() -> Iterator[list[Any] | None]:
    """Whatever happens within, the terminal's settings are then as before; None: no terminal."""
    if not sys.stdin.isatty() or find_spec("termios") is None:
        yield None
        return
    import termios

    before = termios.tcgetattr(sys.stdin)
    try:
        yield list(before)
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


@contextmanager
def _no_echo() -> Iterator[None]:
    """Keys that are pressed meanwhile are not shown in the text; the next message has them."""
    with terminal_as_before() as settings:
        if settings is not None:
            import termios

            settings[3] &= ~termios.ECHO
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, settings)
        yield


class Lines:
    """Lines of a pipe, a file or a terminal without an editor; `echo` gets the prompts."""

    def __init__(self, stream: TextIO, echo: TextIO | None = None, multiline: bool = False):
        self._stream, self._echo, self._multiline = stream, echo, multiline

    def read(self) -> str:
        return read_message(self._line, self._multiline)

    def _line(self, prompt: str) -> str:
        if self._echo:
            self._echo.write(prompt)
            self._echo.flush()
        line = self._stream.readline()
        if not line:
            if self._echo:
                self._echo.write("\n")
            raise EOFError
        return line.rstrip("\r\n")

    def quiet(self) -> AbstractContextManager[object]:
        return nullcontext()


class ReadlineInput:
    """Python's readline: history and completion, Ctrl-C clears what has been typed."""

    def __init__(self, complete: Complete, multiline: bool, color: bool):
        import readline

        self._readline, self._complete = readline, complete
        self._multiline, self._color = multiline, color
        self._found: list[str] = []
        readline.set_completer(self._completion)
        readline.set_completer_delims(" \t\n")
        editline = "libedit" in (readline.__doc__ or "")
        readline.parse_and_bind("bind ^I rl_complete" if editline else "tab: complete")

    def _completion(self, word: str, i: int) -> str | None:
        if i == 0:
            line = self._readline.get_line_buffer()[: self._readline.get_endidx()]
            self._found = self._complete(line)
        return self._found[i] if i < len(self._found) else None

    def read(self) -> str:
        while True:
            try:
                return read_message(self._line, self._multiline)
            except KeyboardInterrupt:
                if not self._readline.get_line_buffer():
                    raise
                sys.stdout.write("\n")

    def _line(self, prompt: str) -> str:
        try:
            return input(f"\001{COLOR}\002{prompt}" if self._color else prompt)
        finally:
            if self._color:
                sys.stdout.write(RESET)
                sys.stdout.flush()

    def quiet(self) -> AbstractContextManager[object]:
        return _no_echo()


class Editor:
    """prompt_toolkit: messages of several lines are edited as one, Alt-Enter is the other Enter."""

    def __init__(self, complete: Complete, multiline: bool, color: bool, out: TextIO):
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import Completer, Completion
        from prompt_toolkit.shortcuts import CompleteStyle
        from prompt_toolkit.styles import Style

        class Words(Completer):
            def get_completions(self, document: Any, event: Any) -> Iterator[Completion]:
                line = document.text_before_cursor
                for word in complete(line):
                    yield Completion(word, -len(line.rsplit(" ", 1)[-1]))

        style = {"": "ansigreen bold", "prompt": "ansigreen bold"} if color else {}
        self._session: PromptSession[str] = PromptSession(
            PROMPT, completer=Words(), complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE, multiline=True, output=_output(out),
            style=Style.from_dict(style), include_default_pygments_style=False,
            prompt_continuation=GOES_ON, key_bindings=_keys(multiline),
        )

    def read(self) -> str:
        return self._session.prompt()

    def quiet(self) -> AbstractContextManager[object]:
        return _no_echo()


def _output(out: TextIO) -> Any:
    """A terminal's output that is never asked where its cursor is: not all answer."""
    if sys.platform == "win32":
        return None
    from prompt_toolkit.output.vt100 import Vt100_Output

    output = Vt100_Output.from_pty(out)
    output.enable_cpr = False
    return output


def _keys(multiline: bool) -> Any:
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def enter(event: Any) -> None:
        buffer = event.current_buffer
        marked = buffer.text.endswith("\\") and buffer.document.is_cursor_at_the_end
        if marked:
            buffer.delete_before_cursor()
        if marked == multiline or ("\n" not in buffer.text and buffer.text.startswith("/")):
            buffer.validate_and_handle()
        else:
            buffer.newline(copy_margin=False)

    @keys.add("escape", "enter")
    def other_enter(event: Any) -> None:
        if multiline:
            event.current_buffer.validate_and_handle()
        else:
            event.current_buffer.newline(copy_margin=False)

    @keys.add("c-c")
    def clear_or_leave(event: Any) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt)

    return keys


def open_input(complete: Complete, multiline: bool, simple: bool, color: bool) -> Input:
    """The best that there is here; the prompt goes to stderr where stdout is no terminal."""
    out = next((s for s in (sys.stdout, sys.stderr) if s.isatty()), None)
    if not sys.stdin.isatty() or out is None:
        return Lines(sys.stdin, None, multiline)
    if simple:
        return Lines(sys.stdin, out, multiline)
    with suppress(ImportError):
        return Editor(complete, multiline, color, out)
    if out is sys.stdout:
        with suppress(ImportError):
            return ReadlineInput(complete, multiline, color)
    return Lines(sys.stdin, out, multiline)
