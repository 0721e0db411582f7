"""Chats: lines in, answers out, and what commands do. Terminals are in test_chat_terminal.py."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from conftest import REPOSITORY
from tiny import tiny_model

from llamagraph.cli import cli
from llamagraph.cli.chat_commands import COMMANDS, Completion
from llamagraph.cli.chat_input import Lines, read_message
from llamagraph.cli.chat_settings import settable
from llamagraph.cli.run import run

WORD = ("--grammar", 'root ::= "<" [a-z]{1,3} ">"')


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(tiny_model(tmp_path_factory.mktemp("models") / "m.gguf", n_ctx=4096))


@pytest.fixture
def talk(path, tmp_path, monkeypatch):
    """A function that runs a chat of lines; it gives the result and the messages at its end."""
    monkeypatch.chdir(tmp_path)

    def chat(*lines, arguments=(*WORD, "-s", "7"), code=0):
        text = "\n".join([*lines, "/save end.json"]) + "\n"
        result = CliRunner().invoke(
            cli, ["run", "--device", "cpu", "-m", path, "-i", *map(str, arguments)], input=text)
        assert result.exit_code == code, (result.stderr, result.exception)
        end = Path("end.json")
        messages = json.loads(end.read_text("utf-8"))["messages"] if end.exists() else []
        return result, messages

    return chat


def contents(messages, role):
    return [m["content"] for m in messages if m["role"] == role]


def errors(result):
    return [line for line in result.stderr.splitlines() if line.startswith("Error: ")]


# ---- Turns ----


def test_answers_are_all_of_stdout_and_facts_are_stderr(talk):
    result, messages = talk("hello", "", "world", "  ")
    assert contents(messages, "user") == ["hello", "world"]
    answers = contents(messages, "assistant")
    assert all(re.fullmatch("<[a-z]{1,3}>", text) for text in answers)
    assert result.stdout == "".join(f"{text}\n" for text in answers)
    assert len(re.findall(r"^\[ prompt: .* t/s \]$", result.stderr, re.MULTILINE)) == 2
    assert re.search(r"^\[ prompt: \d\d tokens and \d+ known", result.stderr, re.MULTILINE)
    assert errors(result) == []


def test_timings_can_be_left_out(talk):
    result, _ = talk("hello", arguments=(*WORD, "--no-show-timings"))
    assert "t/s" not in result.stderr


def test_the_end_of_the_input_is_the_end(talk, path):
    assert talk()[0].stdout == ""
    result = CliRunner().invoke(cli, ["run", "--device", "cpu", "-m", path, "-i"], input="")
    assert result.exit_code == 0 and result.stdout == ""
    done = subprocess.run([sys.executable, "-m", "llamagraph", "run", "--device", "cpu", "-m", path,
                           "-i"], stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, b"")


def test_bytes_that_are_no_text_are_a_sign(path, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "llamagraph", "run", "--device", "cpu", "-m", path, "-i", *WORD],
        input=b"caf\xe9\n/save end.json\n", cwd=tmp_path, capture_output=True, timeout=60,
        env={**os.environ, "PYTHONUTF8": "0", "LC_ALL": "C.UTF-8"})
    assert done.returncode == 0 and b"Traceback" not in done.stderr
    assert json.loads((tmp_path / "end.json").read_text("utf-8"))["messages"][0]["content"] == (
        "caf\ufffd")


def test_a_prompt_is_the_first_message(talk):
    _, messages = talk("world", arguments=(*WORD, "-p", r"hello\n/exit", "-sys", "be kind"))
    assert contents(messages, "user") == ["hello\n/exit", "world"]
    assert contents(messages, "system") == ["be kind"]


def test_a_single_turn(talk):
    result, _ = talk("", "hello", "world", arguments=(*WORD, "-st"))
    assert result.stdout.count("<") == 1
    result, _ = talk("world", arguments=(*WORD, "-st", "-p", "hello"))
    assert result.stdout.count("<") == 1


def test_lines_go_on_behind_a_backslash(talk):
    _, messages = talk("hello\\", "\\", "world", "x\\y", "\\exit")
    assert contents(messages, "user") == ["hello\n\nworld", "x\\y", "\\exit"]


def test_multiline_input_is_the_other_way_round(talk):
    _, messages = talk("hello", "", "world\\", "/save a.json", "x\\",
                       arguments=(*WORD, "--multiline-input"))
    assert contents(messages, "user") == ["hello\n\nworld", "x"]
    assert Path("a.json").exists()


def test_an_end_within_a_message_sends_it():
    lines = iter(["hello\\", "world"])
    assert read_message(lambda _: next(lines), True) == "hello"
    with open(os.devnull) as nothing, pytest.raises(EOFError):
        Lines(nothing).read()


def test_prefix_suffix_and_reverse_prompt(talk):
    _, messages = talk("hello", arguments=(*WORD, "--in-prefix", r"\t", "--in-suffix", "!"))
    assert contents(messages, "user") == ["\thello!"]
    result, _ = talk("hello", arguments=(*WORD, "-r", ">"))
    assert result.stdout.count("<") == 1 and ">" not in result.stdout


def test_raw_text_is_written_in_turn(talk):
    result, messages = talk("x", "", arguments=("-no-cnv", "-p", "hello", *WORD))
    assert contents(messages, "user") == ["hello", "x\n"]
    assert len(contents(messages, "assistant")) == 3
    result, messages = talk("x", arguments=("-no-cnv", "-p", "hello", "-r", "y",
                                            "--grammar", 'root ::= [xy]{9} "z"'))
    assert all(re.fullmatch("x*yx*|[xy]*z", text) for text in contents(messages, "assistant"))
    assert result.stdout.replace("\n", "") == "".join(contents(messages, "assistant"))


def test_a_model_without_a_template_gets_raw_text_and_a_line(path, tmp_path):
    data = Path(path).read_bytes().replace(b"tokenizer.chat_template", b"tokenizer.chat_tempxxxx")
    (tmp_path / "raw.gguf").write_bytes(data)
    command = ["run", "--device", "cpu", "-m", str(tmp_path / "raw.gguf"), "-i", *WORD, "-n", "0"]
    result = CliRunner().invoke(cli, command, input="hello\n")
    assert "has no chat template" in result.stderr
    result = CliRunner().invoke(cli, [*command, "-cnv"], input="hello\n")
    assert result.exit_code == 0 and "has no chat template" not in result.stderr


@pytest.mark.parametrize("option", ["--json", "--jsonl"])
def test_a_chat_is_no_json(path, option):
    result = CliRunner().invoke(cli, ["run", "-m", path, "-i", option], input="hello\n")
    assert result.exit_code == 2 and "one answer" in result.stderr


def test_a_full_context_is_one_line_and_the_chat_goes_on(talk):
    small = (*WORD, "-c", "64")
    result, messages = talk("hello", "y" * 60, "/clear", "world", arguments=small)
    assert len(errors(result)) == 1 and "the context has 64" in errors(result)[0]
    assert contents(messages, "user") == ["world"]
    result, _ = talk("hello", arguments=("--ignore-eos", "-c", "64"))
    assert "[ the context of 64 tokens is full: /clear begins anew" in result.stderr
    result, messages = talk(*["hello"] * 6, arguments=(*small, "--context-shift"))
    assert errors(result) == [] and len(messages) == 12
    assert re.search(r"context of 64 was full: \d+ tokens dropped", result.stderr)


def test_a_prompt_cache_serves_a_chat(talk):
    cached = (*WORD, "--prompt-cache", "p.kv", "-sys", "be kind", "-s", "7")
    result, _ = talk("hello", "world", arguments=cached)
    assert "p.kv: is made anew" in result.stderr
    result, _ = talk("hello", "world", arguments=cached)
    assert re.search(r"p.kv: has (\d+) of the prompt's \1 tokens", result.stderr)
    assert re.search(r"^\[ prompt: 1 tokens and ", result.stderr, re.MULTILINE)
    result, messages = talk("/load none", "hello", arguments=(*cached, "-c", "4096"))
    assert len(errors(result)) == 1 and len(messages) == 3
    Path("p.kv").write_bytes(b"LGPROMPTxx")
    result, _ = talk("hello", arguments=cached, code=1)
    assert "p.kv" in str(result.exception)
    result, _ = talk("hello", arguments=(*WORD, "--prompt-cache-all"), code=2)
    assert "go with --prompt-cache" in result.stderr


# ---- Thinking ----

THINKS = ("--grammar", 'root ::= "<think>" [a-z]{3} "</think>" [A-Z]{2}', "-n", "30")


def test_thinking_is_shown_dimmed_or_folded(talk):
    shown, _ = talk("hello", arguments=THINKS)
    assert re.fullmatch("<think>[a-z]{3}</think>[A-Z]{2}\n", shown.stdout)
    folded, messages = talk("hello", arguments=(*THINKS, "--fold-thinking"))
    assert re.fullmatch("[A-Z]{2}\n", folded.stdout)
    assert re.search(r"\[ thought for \d+ tokens \]", folded.stderr)
    assert re.fullmatch("[a-z]{3}", messages[1]["reasoning_content"])
    coloured, _ = talk("hello", arguments=(*THINKS, "--color", "on"))
    text = re.sub(r"\x1b\[2m([a-z]+)\x1b\[0m", r"\1", coloured.stdout)
    assert "\x1b[2m" in coloured.stdout and re.fullmatch("[a-z]{3}\n\n[A-Z]{2}\n", text)


def test_one_answer_folds_it_too(path):
    result = CliRunner().invoke(cli, ["run", "--device", "cpu", "-m", path, "hello", *THINKS,
                                      "--fold-thinking"])
    assert re.fullmatch("[A-Z]{2}\n", result.stdout) and "thought for" in result.stderr


# ---- Commands ----


def test_help_lists_every_command(talk):
    result, messages = talk("/help")
    assert all(f"  {name}" in result.stderr for name in COMMANDS)
    assert result.stdout == "" and messages == []


def test_the_readme_lists_every_command():
    readme = (REPOSITORY / "README.md").read_text()
    table = next(p for p in readme.split("\n\n") if p.startswith("| command |"))
    listed = re.findall(r"`(/[a-z]+)((?: [A-Z]+)*)`", table)
    assert {name: argument.strip() for name, argument in listed} == {
        name: command.argument for name, command in COMMANDS.items()}


def test_exit_leaves_at_once(talk):
    result, messages = talk("hello", "/exit", "world")
    assert messages == [] and result.stdout.count("<") == 1


@pytest.mark.parametrize("line, message", [
    ("/foo", "/foo: there is no such command"), ("/", "/: there is no such command"),
    ("/exit now", "/exit: takes nothing after it"), ("/read", "/read FILE: a file is missing"),
    ("/read nowhere.txt", "nowhere.txt: cannot be read"), ("/load nowhere", "nowhere: cannot be"),
    ("/save /dev/null/x", "/dev/null/x: cannot be written"), ("/regen", "nothing yet to answer"),
    ("/set heat 3", "/set heat: there is no such option"), ("/set temp hot", "temp: 'hot' is not"),
    ("/set mirostat 5", "mirostat is 5"), ("/set ignore-eos maybe", "is not on or off"),
    ("/set grammar root", "grammar"), ("/set grammar-file nowhere", "nowhere: cannot be read"),
    ("/set samplers heat", "no sampler 'heat'"), ("/set logit-bias x", "not ID+BIAS"),
    ("/set logit-bias 999999+1", "logit bias for token 999999"),
    ("/set reverse-prompt 'x", "reverse-prompt: No closing quotation"),
    ("/set model other.gguf", "there is no such option"),
    ("/save a\0b", "cannot be written"), ("/read a\0b", "cannot be read"), ("/load a\0b", "a\0b: "),
    *((f"/{do} " + "a" * 300, "cannot be") for do in ("save", "read", "load")),
])
def test_what_goes_wrong_is_one_line_and_nothing_else_changes(talk, line, message):
    result, messages = talk(line, "hello", "world")
    assert len(errors(result)) == 1 and message in errors(result)[0]
    assert len(messages) == 4


def test_paths_and_indented_lines_are_messages(talk):
    _, messages = talk("/usr/bin/env is what?", " /exit", "/Exit")
    assert contents(messages, "user") == ["/usr/bin/env is what?", " /exit", "/Exit"]


def test_regen_answers_once_more(talk):
    many = ("--grammar", 'root ::= "<" [a-z]{9} ">"', "-s", "7")
    result, messages = talk("hello", "world", "/regen", "/regen", arguments=many)
    first, second, third, fourth = result.stdout.split()
    assert len({second, third, fourth}) == 3
    assert contents(messages, "assistant") == [first, fourth]
    assert re.search(r"^\[ prompt: 1 tokens and ", result.stderr, re.MULTILINE)
    result, _ = talk("hello", "/regen", arguments=(*many, "--temp", "0"))
    assert len(set(result.stdout.split())) == 1 and "at temp 0" in result.stderr


def test_clear_keeps_the_system_message(talk):
    _, messages = talk("hello", "/clear", "world", arguments=(*WORD, "-sys", "be kind"))
    assert contents(messages, "system") == ["be kind"] and contents(messages, "user") == ["world"]


def test_read_puts_files_before_the_next_message(talk, tmp_path):
    (tmp_path / "a b.txt").write_text("from a file\n")
    (tmp_path / "c.txt").write_text("more")
    (tmp_path / "empty.txt").write_text("\n")
    result, messages = talk("/read 'a b.txt'", "/read c.txt", "/read empty.txt", "what is it?",
                            "/read a b.txt", "", "hello")
    assert contents(messages, "user") == ["from a file\n\nmore\n\nwhat is it?", "from a file",
                                          "hello"]
    assert re.search(r"\[ a b.txt: \d+ tokens; they go before your next message \]", result.stderr)
    assert "empty.txt: is empty" in errors(result)[0]


def test_save_and_load(talk, tmp_path):
    (tmp_path / "bad.json").write_text("{")
    result, messages = talk("hello", "/save a.json", "world", "/load bad.json", "/load a.json",
                            "/save bad.json", "or", arguments=(*WORD, "-sys", "be kind"))
    assert contents(messages, "user") == ["hello", "or"]
    assert contents(messages, "system") == ["be kind"]
    assert len(errors(result)) == 2 and all("bad.json: is" in line for line in errors(result))
    assert "[ a.json: 2 messages ]" in result.stderr and "  user: hello" in result.stderr
    _, messages = talk("/load a.json", "x", arguments=(*WORD, "-sys", "be rude"))
    assert contents(messages, "system") == ["be kind"]


# ---- /set ----


def test_set_changes_what_comes_next(talk):
    result, messages = talk(
        "/set predict 2", "/set ignore-eos on", "/set temp 0", "hello",
        "/set predict 5", "/set --top_k 3", "hello", "/set logit-bias 65+1000 18-inf", "hello",
        "/set logit-bias none", "/set temp default", "/set", "/set top-k",
        arguments=("-s", "3", "--temp", "1.5"))
    counts = [int(n) for n in re.findall(r"generation: (\d+) tokens", result.stderr)]
    assert counts == [2, 5, 5] and errors(result) == []
    assert contents(messages, "assistant")[2] == "AAAAA"
    shown = dict(line.split() for line in re.findall(r"^  (\S+ \S+)$", result.stderr,
                                                     re.MULTILINE))
    assert shown["temp"] == "0.8" and shown["top-k"] == "3" and shown["predict"] == "5"


def test_set_a_grammar_a_seed_a_system_message_and_a_stop(talk):
    result, messages = talk(
        "hello", "/set grammar root ::= [A-Z]{4}", "hello", r"/set json-schema {\"const\": 12}",
        '/set json-schema {"const": 12}', "hello", "/set json-schema default", "/set predict 3",
        "/set system-prompt be kind", "hello", "/set seed 4", "/regen", "/set seed 4", "/regen",
        '/set reverse-prompt "<"', '/set grammar root ::= "a<"', "hello")
    answers = result.stdout.split("\n")
    assert re.fullmatch("<[a-z]{1,3}>", answers[0]) and re.fullmatch("[A-Z]{4}", answers[1])
    assert answers[2] == "12" and answers[-2] == "a"
    assert contents(messages, "system") == ["be kind"] and errors(result) == []


def test_every_sampling_option_can_be_set():
    from llamagraph.cli.sampling_options import SAMPLING

    assert set(SAMPLING) <= {option.name for option in settable(run.params).values()}


def test_every_option_can_be_set_back(talk):
    names = {option.name: name for name, option in settable(run.params).items()}.values()
    result, messages = talk(*(f"/set {name} default" for name in names), "/set predict 2", "hello")
    assert errors(result) == [] and len(messages) == 2


def test_stats_count(talk):
    result, _ = talk("hello", "world", "/stats", arguments=(*WORD, "-c", "500"))
    assert re.search(r"\[ 4 messages; \d+ of 500 tokens of the context used \]", result.stderr)
    assert re.search(r"\[ \d+ tokens generated in .* s, .* t/s; \d+ read, \d+ were there",
                     result.stderr)
    assert "device cpu" in result.stderr


# ---- Completion ----


def test_completion(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "novels").mkdir()
    complete = Completion(settable(run.params))
    assert complete("/re") == ["/regen", "/read "]
    assert complete("/s") == ["/save ", "/set ", "/stats"] and complete("/") == [
        f"{name} " if command.argument else name for name, command in COMMANDS.items()]
    assert complete("/set temp") == ["temp "] and complete("/set mirostat-") == [
        "mirostat-ent ", "mirostat-lr "]
    assert complete("/set ignore-eos o") == ["on", "off"]
    assert complete("/set reasoning ") == ["on", "off", "auto"]
    assert complete("/read no") == ["notes.txt", "novels/"]
    assert complete(f"/load {tmp_path}/nov") == [f"{tmp_path}/novels/"]
    for line in ("hello", "say /re", "/help ", "/set heat x", "/read a b", "/set temp 0 "):
        assert complete(line) == []


# ---- Ctrl-C ----


def test_the_first_ctrl_c_stops_the_answer_and_the_chat_goes_on(path):
    """On a pipe: a second one while an answer is written leaves with 130."""
    command = [sys.executable, "-m", "llamagraph", "run", "--device", "cpu", "-m", path, "-i",
               "--grammar", "root ::= [a-z]+", "--ignore-eos", "-s", "1"]
    running = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    for _ in range(2):
        running.stdin.write(b"hello\n")
        running.stdin.flush()
        assert running.stdout.read(3).isalpha()
        running.send_signal(signal.SIGINT)
        assert running.stdout.readline().endswith(b"\n")
    out, err = running.communicate(b"/set predict 3\nhello\n", timeout=60)
    assert running.returncode == 0 and out.strip().isalpha()
    assert err.count(b"[ stopped ]") == 2 and b"Traceback" not in err
