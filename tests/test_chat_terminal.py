"""Chats at a real terminal, a pseudo one: keys in, what the user sees out, by every editor."""

import json
import os
import re
import select
import signal
import subprocess
import sys
import termios
import time
from contextlib import contextmanager
from importlib.util import find_spec

import pytest
from tiny import tiny_model

PATIENCE = 60  # seconds until something that should come is missed
WORD = ("--grammar", 'root ::= "<" [a-z]{1,3} ">"')
ENDLESS = ("--grammar", "root ::= [a-z]+", "--ignore-eos")
START = {
    "editor": "from llamagraph.cli import main; main()",
    "readline": "import sys; sys.modules['prompt_toolkit'] = None; "
                "from llamagraph.cli import main; main()",
}
UP, LEFT, ALT_ENTER, CTRL_C, CTRL_D, TAB = "\x1b[A", "\x1b[D", "\x1b\r", "\x03", "\x04", "\t"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(tiny_model(tmp_path_factory.mktemp("models") / "m.gguf", n_ctx=4096))


@pytest.fixture(params=START)
def start(request):
    if find_spec({"editor": "prompt_toolkit"}.get(request.param, request.param)) is None:
        pytest.skip(f"there is no {request.param}")
    return START[request.param]


class Terminal:
    """A process at a terminal of its own."""

    def __init__(self, command, cwd, **streams):
        self.leader, follower = os.openpty()
        self.attributes = termios.tcgetattr(self.leader)
        options = {"stdin": follower, "stdout": follower, "stderr": follower, **streams}
        environment = os.environ | {"TERM": "xterm", "INPUTRC": os.devnull, "COLUMNS": "80"}
        self.process = subprocess.Popen(command, cwd=cwd, env=environment, start_new_session=True,
                                        preexec_fn=lambda: own_terminal(follower), **options)
        os.close(follower)
        self.seen, self._at = "", 0  # all there was, and where the last `wait` ended

    def keys(self, text):
        os.write(self.leader, text.encode())

    def wait(self, text):
        """What was seen up to this text, without colours and movements of the cursor."""
        return self.match(re.escape(text))

    def match(self, pattern):
        give_up = time.monotonic() + PATIENCE
        while not (found := re.search(pattern, shown := plain(self.seen)[self._at :])):
            assert time.monotonic() < give_up, f"{pattern!r} is not in {shown!r}"
            self._read()
        self._at += found.end()
        return shown[: found.end()]

    def prompt(self):
        return self.wait(">")

    def _read(self):
        if select.select([self.leader], [], [], 1)[0]:
            try:
                self.seen += os.read(self.leader, 4096).decode(errors="replace")
            except OSError:  # nobody has it open any more
                time.sleep(0.01)

    def end(self):
        """The exit code."""
        give_up = time.monotonic() + PATIENCE
        while self.process.poll() is None:
            assert time.monotonic() < give_up, plain(self.seen)
            self._read()
        return self.process.returncode


def own_terminal(follower):
    import fcntl

    fcntl.ioctl(follower, termios.TIOCSCTTY, 0)


def plain(text):
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[()=>][0-9A-B]?|\x01|\x02|\r", "", text)


@contextmanager
def chat(start, path, cwd, *arguments, **streams):
    command = [sys.executable, "-c", start, "run", "--device", "cpu", "-m", path, "-s", "7",
               *arguments]
    terminal = Terminal(command, cwd, **streams)
    try:
        terminal.wait("Ctrl-D leaves ]")
        terminal.prompt()
        yield terminal
    finally:
        if terminal.process.poll() is None:
            terminal.process.kill()
            terminal.process.wait()
        os.close(terminal.leader)


def messages(terminal, cwd):
    terminal.keys("/save end.json\r")
    terminal.wait("end.json: ")
    return [m["content"] for m in json.loads((cwd / "end.json").read_text())["messages"]
            if m["role"] == "user"]


def test_a_line_is_edited_and_comes_back(start, path, tmp_path):
    with chat(start, path, tmp_path, *WORD) as t:
        t.keys(f"helo{LEFT}l\r")
        shown = t.wait("t/s ]")
        assert re.search(r"<[a-z]{1,3}>\n", shown)
        t.prompt()
        t.keys(f"{UP}{LEFT * 5}say \r")
        t.wait("t/s ]")
        t.prompt()
        t.keys(f"{UP}{UP}\x1b[B!\r")
        t.wait("t/s ]")
        t.prompt()
        assert messages(t, tmp_path) == ["hello", "say hello", "say hello!"]
        t.prompt()
        t.keys(CTRL_D)
        assert t.end() == 0
        assert termios.tcgetattr(t.leader) == t.attributes


def test_ctrl_c_stops_an_answer_then_clears_a_line_then_leaves(start, path, tmp_path):
    with chat(start, path, tmp_path, *ENDLESS) as t:
        t.keys("hello\r")
        t.wait("hello")
        t.match("[a-z]{20}")
        t.keys(CTRL_C)
        t.wait("[ stopped ]")
        t.prompt()
        t.keys("/set predict 3\r")
        t.wait("predict 3\n")
        t.prompt()
        t.keys("never sent")
        t.wait("never sent")
        time.sleep(1.5)  # Python's readline hears of a signal only while it waits for a key
        t.keys(CTRL_C)
        t.match(">| {8}")  # a new line, or the same one emptied
        assert messages(t, tmp_path) == ["hello"]
        t.prompt()
        t.keys(CTRL_C)
        assert t.end() == 130
        assert termios.tcgetattr(t.leader) == t.attributes


def test_completion_at_a_tab(start, path, tmp_path):
    with chat(start, path, tmp_path, *WORD) as t:
        t.keys(f"/he{TAB}\r")
        t.wait("/stats")
        t.prompt()
        t.keys(f"/set mirostat-e{TAB}3\r")
        t.wait("mirostat-ent 3")
        t.prompt()
        t.keys("/exit\r")
        assert t.end() == 0


def test_several_lines_are_one_message(start, path, tmp_path):
    with chat(start, path, tmp_path, *WORD) as t:
        t.keys("one\\\r")
        t.keys("two\r")
        t.wait("t/s ]")
        t.prompt()
        t.keys("\x1b[200~three\nfour\x1b[201~\r")
        t.wait("t/s ]")
        t.prompt()
        assert messages(t, tmp_path) == ["one\ntwo", "three\nfour"]


def test_multiline_input(start, path, tmp_path):
    with chat(start, path, tmp_path, *WORD, "-mli") as t:
        t.keys("one\r")
        t.keys("two\\\r")
        t.wait("t/s ]")
        t.prompt()
        assert messages(t, tmp_path) == ["one\ntwo"]


def test_alt_enter_in_the_editor(path, tmp_path):
    pytest.importorskip("prompt_toolkit")
    with chat(START["editor"], path, tmp_path, *WORD) as t:
        t.keys(f"one{ALT_ENTER}two\r")
        t.wait("t/s ]")
        t.prompt()
        assert messages(t, tmp_path) == ["one\ntwo"]


def test_keys_pressed_during_an_answer_are_not_shown_in_it(start, path, tmp_path):
    with chat(start, path, tmp_path, "--grammar", "root ::= [a-z]{300}", "--ignore-eos") as t:
        t.keys("hello\r")
        t.match("[a-z]{20}")
        t.keys("NEXT\r")
        shown = t.wait("t/s ]")
        assert "NEXT" not in shown.split("t/s ]")[0]
        t.wait("t/s ]")
        t.prompt()
        assert messages(t, tmp_path) == ["hello", "NEXT"]


def test_a_terminal_is_as_before_when_the_chat_is_told_to_end(start, path, tmp_path):
    with chat(start, path, tmp_path, *WORD, "-i", "hello") as t:
        t.keys("half a line")
        t.wait("half a line")
        time.sleep(0.3)
        t.process.terminate()
        assert t.end() == 128 + signal.SIGTERM
        assert termios.tcgetattr(t.leader) == t.attributes
        assert "Traceback" not in t.seen and "> hello" in plain(t.seen)


def test_simple_io_has_no_editor_and_no_colours(path, tmp_path):
    with chat(START["editor"], path, tmp_path, *WORD, "--simple-io", "--log-colors", "off") as t:
        t.keys("hello\r")
        t.wait("t/s ]")
        assert "\x1b" not in t.seen
        t.prompt()
        t.keys(CTRL_D)
        assert t.end() == 0


def test_an_answer_in_a_file_is_alone_there(start, path, tmp_path):
    with open(tmp_path / "out.txt", "wb") as out, chat(start, path, tmp_path, *WORD,
                                                       stdout=out) as t:
        t.keys("hello\r")
        t.wait("t/s ]")
        t.prompt()
        t.keys(CTRL_D)
        assert t.end() == 0
    assert re.fullmatch("<[a-z]{1,3}>\n", (tmp_path / "out.txt").read_text())


def test_a_terminal_is_not_sent_control_characters(path, tmp_path):
    escape = ("-l", "27+1000", "--ignore-eos", "-n", "3", "--log-colors", "off", "--color", "off")
    with chat(START["editor"], path, tmp_path, *escape, "--simple-io") as t:
        t.keys("hello\r")
        t.wait("t/s ]")
        assert "\u241b" * 3 in t.seen and "\x1b" not in t.seen


def test_no_prompt_and_no_conversation_is_a_usage_error(path, tmp_path):
    command = [sys.executable, "-m", "llamagraph", "run", "-m", path, "-no-cnv"]
    t = Terminal(command, tmp_path)
    assert t.end() == 2 and "no prompt" in plain(t.seen)
    os.close(t.leader)


def test_a_prompt_at_a_terminal_is_one_answer(path, tmp_path):
    command = [sys.executable, "-m", "llamagraph", "run", "--device", "cpu", "-m", path, "hello",
               *WORD]
    t = Terminal(command, tmp_path)
    assert t.end() == 0
    os.close(t.leader)


def test_a_long_prompt_is_stopped_and_taken_back(path, tmp_path):
    (tmp_path / "long.txt").write_text("hello world " * 1200)
    with chat(START["editor"], path, tmp_path, *WORD, "-ub", "1", "--simple-io") as t:
        t.keys("/read long.txt\r")
        t.wait("next message ]")
        t.prompt()
        t.keys("hello\r")
        t.wait("[ reading: ")
        os.killpg(t.process.pid, signal.SIGINT)
        t.wait("[ stopped; the message is taken back ]")
        t.prompt()
        assert messages(t, tmp_path) == []
        t.prompt()
        t.keys("hello\r")  # the file goes with it once more
        t.wait("[ reading: ")
        os.killpg(t.process.pid, signal.SIGINT)
        t.wait("[ stopped; the message is taken back ]")
        t.prompt()
        os.killpg(t.process.pid, signal.SIGINT)
        assert t.end() == 130
