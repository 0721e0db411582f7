"""The command line: what goes where, and the exit codes."""

import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
import tracemalloc

import pytest
from click.testing import CliRunner
from damage import damaged_files
from gguf_files import tiny_llama
from tiny import tiny_model

from llamagraph.cli import cli
from llamagraph.errors import LlamaGraphError


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(tiny_model(tmp_path_factory.mktemp("models") / "m.gguf", n_ctx=4096))


def invoke(*arguments, stdin=None):
    return CliRunner().invoke(cli, ["run", "--device", "cpu", *arguments], input=stdin)


def process(*arguments, **options):
    command = [sys.executable, "-m", "llamagraph", "run", "--device", "cpu", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    return subprocess.Popen(command, **{**pipes, **options})


def test_stdout_is_the_answer_and_stderr_the_facts(path):
    result = invoke("-m", path, "hello", "-n", "5", "--temp", "0", "--ignore-eos")
    report = json.loads(
        invoke("-m", path, "hello", "-n", "5", "--temp", "0", "--ignore-eos", "--json").stdout
    )
    assert result.exit_code == 0
    assert result.stdout.rstrip("\n") == report["text"].rstrip("\n")
    assert "t/s" in result.stderr and "t/s" not in result.stdout


def test_json_has_what_a_script_wants(path):
    result = invoke("-m", path, "-p", "hello", "-n", "4", "-s", "3", "--json", "--logprobs", "2",
                    "--ignore-eos")
    report = json.loads(result.stdout)
    assert set(report) == {"text", "tokens", "prompt_tokens", "stop_reason", "timings", "settings",
                           "logprobs"}
    assert set(report["timings"]) == {"load_seconds", "first_token_seconds",
                                      "prompt_tokens_per_second", "decode_tokens_per_second",
                                      "prompt_tokens_reused"}
    assert len(report["tokens"]) == 4 and report["stop_reason"] == "limit"
    assert [len(step) for step in report["logprobs"]] == [2] * 4
    assert report["settings"]["seed"] == 3


def test_a_prompt_is_one_user_turn_unless_raw(path):
    def prompt_tokens(*arguments, stdin=None):
        result = invoke("-m", path, *arguments, "-n", "0", "--json", stdin=stdin)
        return json.loads(result.stdout)["prompt_tokens"]

    raw = prompt_tokens("-no-cnv", "hello")
    turn = prompt_tokens("hello")
    assert len(raw) == 1 and raw[0] in turn and len(turn) > len(raw)
    assert prompt_tokens("-no-cnv", stdin="hello\n") == raw
    assert prompt_tokens("-no-cnv", "-", stdin="hello\n") == raw
    assert prompt_tokens("-no-cnv", "-p", "hello") == raw


def test_a_file_is_read_as_the_prompt(path, tmp_path):
    (tmp_path / "p.txt").write_text("hello\n")
    result = invoke("-m", path, "-no-cnv", "-f", str(tmp_path / "p.txt"), "-n", "0", "--json")
    assert len(json.loads(result.stdout)["prompt_tokens"]) == 1


def test_display_prompt_echoes_it_first(path):
    result = invoke("-m", path, "-no-cnv", "hello", "-n", "3", "--display-prompt")
    assert result.stdout.startswith("hello")


@pytest.mark.parametrize("arguments, code, message", [
    (["-m", "nowhere.gguf", "hello"], 1, "nowhere.gguf"),
    (["--frobnicate"], 2, "No such option"),
    (["-n", "-7", "hello"], 2, "-7"),
    (["--graph", "--graph-mode", "stream", "hello"], 2, "contradicts"),
    (["-f", "nowhere.txt"], 1, "nowhere.txt"),
])
def test_errors_are_short_and_have_their_codes(arguments, code, message):
    done = process(*arguments)
    out, err = done.communicate(timeout=60)
    assert done.returncode == code
    assert message in err.decode() and "Traceback" not in err.decode() and out == b""


def test_a_full_context_is_said(path):
    arguments = ("-m", path, "hello", "--ignore-eos", "-c", "40")
    full = invoke(*arguments)
    assert full.exit_code == 0 and "[ the context of 40 tokens is full: -c makes it" in full.stderr
    assert "is full" not in invoke(*arguments, "-n", "3").stderr


def test_an_empty_stdin_is_a_usage_error(path):
    done = process("-m", path)
    assert b"no prompt" in done.communicate(timeout=60)[1]
    assert done.returncode == 2


@pytest.mark.parametrize("mode", ["stream", "capture", "build", "partial", "loop"])
def test_every_mode_gives_the_same_text(path, mode):
    arguments = ("-m", path, "hello", "-n", "8", "-s", "1", "--graph-mode")
    assert invoke(*arguments, mode).stdout == invoke(*arguments, "stream").stdout


def test_another_architectures_choices_give_the_same_text(path):
    arguments = ("-m", path, "hello", "-n", "8", "--temp", "0", "--ignore-eos", "--json")
    plain, chosen = (json.loads(invoke(*arguments, *more).stdout)
                     for more in ((), ("--arch-tuning", "sm_80")))
    assert chosen["tokens"] == plain["tokens"]
    assert chosen["settings"]["graph_mode"] == "capture" != plain["settings"]["graph_mode"]
    result = invoke("-m", path, "hello", "--arch-tuning", "sm_1")
    assert result.exit_code == 1 and "unknown target 'sm_1'" in str(result.exception)


@pytest.mark.parametrize("mode", ["stream", "loop"])
def test_interrupt_keeps_the_text_prints_timings_and_exits_130(path, mode):
    running = process("-m", path, "hello", "--ignore-eos", "-s", "1", "--graph-mode", mode)
    first = running.stdout.read(1)
    running.send_signal(signal.SIGINT)
    rest, err = running.communicate(timeout=60)
    assert running.returncode == 130
    assert (first + rest).endswith(b"\n")
    assert b"t/s" in err and b"Traceback" not in err


def test_the_answer_ends_before_the_device_is_closed(path):
    """The reader of an interrupted answer waits for no more than its last step."""
    script = ("import sys\nfrom llamagraph.cli import main\nfrom llamagraph.runner import Runner\n"
              "close = Runner.close\n"
              "Runner.close = lambda runner: (sys.stdin.read(), close(runner))\nmain()\n")
    running = subprocess.Popen(
        [sys.executable, "-c", script, "run", "--device", "cpu", "-m", path, "-p", "hello",
         "--ignore-eos", "--graph-mode", "loop"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)
    text = part = running.stdout.read(1)
    running.send_signal(signal.SIGINT)
    while part and select.select([running.stdout], [], [], 60)[0]:
        text += (part := running.stdout.read(1 << 16))
    assert part == b"" and text.endswith(b"\n")
    assert running.poll() is None, "the device is open as long as its input is"
    err = running.communicate(timeout=60)[1]
    assert running.returncode == 130 and b"t/s" in err


def test_a_reader_that_leaves_ends_it_quietly(path):
    read, write = os.pipe()
    running = process("-m", path, "hello", "--ignore-eos", "-s", "1", stdout=write)
    os.close(write)
    os.read(read, 1)
    os.close(read)
    _, err = running.communicate(timeout=60)
    assert running.returncode == 0
    assert b"Traceback" not in err and b"Broken" not in err


def test_the_command_line_needs_nothing_that_is_slow_to_load():
    code = "import llamagraph.cli, sys; assert not {'numpy', 'rich', 'jinja2'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_version_and_devices():
    assert CliRunner().invoke(cli, ["--version"]).stdout.startswith("llamagraph 0.")
    assert "cpu" in CliRunner().invoke(cli, ["run", "--list-devices"]).stdout


def test_damaged_files_end_in_one_line_that_names_the_file(tmp_path):
    file, valid = tmp_path / "model.gguf", tiny_llama(0)
    arguments = ("-m", str(file), "hello", "-n", "2")
    file.write_bytes(valid)
    assert invoke(*arguments).exit_code == 0
    tracemalloc.start()
    for label, data in damaged_files(0, valid):
        file.write_bytes(data)
        error = invoke(*arguments).exception
        assert isinstance(error, LlamaGraphError), label
        assert str(error).startswith(str(file)) and "\n" not in str(error), label
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 30


def test_system_message_stop_text_and_bias(path):
    base = ("-m", path, "hello", "--temp", "0", "--ignore-eos", "-n", "12", "--json")
    plain = json.loads(invoke(*base).stdout)
    system = json.loads(invoke(*base, "-sys", "world").stdout)
    assert len(system["prompt_tokens"]) > len(plain["prompt_tokens"])
    stop = plain["text"][4:6]
    stopped = json.loads(invoke(*base, "-r", "never", "-r", stop).stdout)
    assert stopped["text"] == plain["text"][: plain["text"].index(stop)]
    assert stopped["stop_reason"] == "stop"
    biased = json.loads(invoke(*base, "-l", "17+1000").stdout)
    assert biased["tokens"] == [17] * 12
    banned = json.loads(invoke(*base, "-l", f"{plain['tokens'][0]}-inf").stdout)
    assert plain["tokens"][0] not in banned["tokens"]


@pytest.mark.parametrize("bias, message", [("x", "not ID+BIAS"), ("9999999+1", "has tokens 0 to")])
def test_a_wrong_bias_is_explained(path, bias, message):
    result = invoke("-m", path, "hello", "-l", bias)
    assert message in result.stderr + str(result.exception) and result.exit_code in (1, 2)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
@pytest.mark.parametrize("command", ["run --device cpu -n 2 hello", "inspect-graph"])
def test_a_full_disk_is_one_line(path, command):
    done = subprocess.run(f"{sys.executable} -m llamagraph {command} -m {path} >/dev/full",
                          shell=True, capture_output=True, timeout=60,
                          env={k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"})
    assert done.returncode == 1 and b"Traceback" not in done.stderr
    said = b"Error: what is printed cannot be written: No space left on device\n"
    assert said in done.stderr and b"ignored" not in done.stderr


def test_closed_streams_are_no_traceback(path):
    command = f"{sys.executable} -m llamagraph run --device cpu -m {path} -n 2"
    for redirect, code in (("<&-", 2), ("hello >&-", 0), ("hello 2>&-", 0)):
        done = subprocess.run(f"{command} {redirect}", shell=True, capture_output=True, timeout=60)
        assert done.returncode == code and b"Traceback" not in done.stderr, redirect


def test_json_into_a_pipe_that_closes_ends_quietly(path):
    read, write = os.pipe()
    running = process("-m", path, "hello", "-n", "40", "--json", stdout=write)
    os.close(write)
    os.close(read)
    _, err = running.communicate(timeout=60)
    assert running.returncode == 0 and b"Traceback" not in err


@pytest.mark.parametrize("prepare, rows", [("auto", "1 1"), ("1,8", "1 8 1"), ("lazy", "1 1")])
def test_what_is_prepared_is_said(path, prepare, rows):
    arguments = ("-m", path, "-no-cnv", "h", "-n", "3", "--graph-mode", "build", "-v",
                 "--graph-prepare", prepare)
    stderr = invoke(*arguments).stderr
    made = re.findall(r"program rows=(\d+) .* launches, \d+ nodes, 0 kB, made in [\d.]+ ms", stderr)
    assert set(made) == set(rows.split()), stderr
    assert invoke(*arguments[:-1], "often").exit_code == 2


def test_logprobs_without_json_is_a_usage_error(path):
    assert invoke("-m", path, "hello", "--logprobs", "2").exit_code == 2


def test_damage_ends_with_exit_code_1_and_one_line_within_two_gigabytes(tmp_path):
    """As a user sees it, in a process that may not take more addresses than that."""
    file = tmp_path / "model.gguf"
    for _, data in list(damaged_files(1, tiny_llama(0)))[::60]:
        file.write_bytes(data)
        done = process("-m", str(file), "hello", preexec_fn=limit_addresses)
        out, err = done.communicate(timeout=20)
        assert done.returncode == 1 and out == b""
        assert err.startswith(f"Error: {file}".encode()) and err.count(b"\n") == 1


def limit_addresses():
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))


def test_the_types_of_the_kv_cache_are_llama_clis(path):
    arguments = "-m", path, "hello", "-n", "5", "--temp", "0", "--ignore-eos"
    assert invoke(*arguments, "-ctk", "bf16", "--cache-type-v", "f16").exit_code == 0
    refused = invoke(*arguments, "-ctk", "q8_0")
    assert "-ctk q8_0: heads of 16 numbers" in str(refused.exception)
    assert invoke(*arguments, "-ctv", "q5_1").exit_code == 2
