"""The options of `run`: names, environment, help and README, and what is not there."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from conftest import REPOSITORY
from tiny import tiny_model

from llamagraph.cli import cli
from llamagraph.cli.options import read_device, read_overrides
from llamagraph.cli.prompt import unescape
from llamagraph.cli.run import run
from llamagraph.cli.sampling_options import SAMPLING
from llamagraph.cli.unsupported import advice
from llamagraph.sampling import SAMPLERS, SamplingParams

SHOWN = [p for p in run.params if isinstance(p, click.Option) and not p.hidden]
GROUPS = ["Model", "Prompt", "Sampling", "Output", "GPU and graphs", "Other"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(tiny_model(tmp_path_factory.mktemp("models") / "m.gguf", n_ctx=4096, n_layer=3))


def invoke(*arguments, stdin=None, **environment):
    return CliRunner().invoke(cli, ["run", "--device", "cpu", *map(str, arguments)], input=stdin,
                              env=environment)


def answer(path, *arguments, **environment):
    """The object of --json; the answer has no tokens unless -n is given."""
    more = () if "-n" in arguments else ("-n", 0)
    result = invoke("-m", path, *arguments, *more, "--json", **environment)
    assert result.exit_code == 0, result.stderr + str(result.exception)
    return json.loads(result.stdout)


def names_of(option: click.Option) -> set[str]:
    return {*option.opts, *option.secondary_opts}


# ---- Help, README, defaults and the code say the same ----


def test_the_readme_lists_every_option_and_no_other():
    readme = (REPOSITORY / "README.md").read_text()
    rows = next(p for p in readme.split("\n\n") if p.startswith("| group | options")).splitlines()
    listed: dict[str, set[str]] = {}
    title = ""
    for row in rows[2:]:
        title = row.split("|")[1].strip() or title
        listed.setdefault(title, set()).update(re.findall(r"`(-[^`]+)`", row))
    shown: dict[str, set[str]] = {}
    for option in SHOWN:
        shown.setdefault(getattr(option, "title", "Other"), set()).update(names_of(option))
    assert list(listed) == GROUPS
    for title in GROUPS:
        assert listed[title] == shown.get(title, set()), title


def test_help_has_the_groups_and_every_option():
    text = CliRunner().invoke(cli, ["run", "--help"]).stdout
    assert re.findall(r"^(\S.*):$", text, re.MULTILINE) == GROUPS
    for option in SHOWN:
        assert option.help, option.name
        assert all(name in text for name in names_of(option) if not name.startswith("--no-"))
    assert "-ncmoe" not in text


def test_defaults_are_those_of_the_python_face():
    options, defaults = {p.name: p for p in SHOWN}, SamplingParams()
    for name in set(SAMPLING) - {"seed", "samplers", "dry_sequence_breakers", "logit_bias"}:
        assert options[name].default == getattr(defaults, name), name
    assert all(name in options["samplers"].help for name in SAMPLERS)


def test_no_name_is_taken_twice_and_nothing_is_both_there_and_refused():
    names = [name for p in run.params if isinstance(p, click.Option) for name in names_of(p)]
    assert len(names) == len(set(names))
    assert not set(advice()) & {name for p in SHOWN for name in names_of(p)}


# ---- What is not there ----


@pytest.mark.parametrize("name", sorted(advice()))
def test_each_unsupported_option_gets_one_line_with_advice(name):
    result = invoke("hello", name)
    assert result.exit_code == 2
    assert result.stderr == f"Error: {name}: llamagraph does not have it: {advice()[name]}\n"


@pytest.mark.parametrize("arguments, message", [
    (["-ncmoe", "10"], "-ncmoe: llamagraph does not have it: a model runs on one GPU"),
    (["--override-tensor=x=CPU"], "--override-tensor: "),
    (["-ngl", "1"], "-ngl 1: a model of 3 layers cannot be split"),
    (["-fa", "off"], "-fa off: attention never writes its scores to memory; use on or auto"),
    (["-lm", "mlock"], "-lm mlock: files are always mapped into memory; use auto or mmap"),
    (["--no-jinja"], "--no-jinja: there are no other templates"),
    (["--device", "CUDA0,CUDA1"], "a model runs on one device"),
])
def test_what_cannot_be_is_one_line(path, arguments, message):
    result = invoke("-m", path, "hello", *arguments)
    assert result.exit_code == 2 and message in result.stderr
    assert result.stderr.count("\n") == 1 and result.stdout == ""


@pytest.mark.parametrize("arguments", [
    ["--samplers", "top_k;heat"], ["--sampler-seq", "z"], ["--samplers", "top_k", "--sampler-seq",
                                                           "k"],
    ["--override-kv", "a=b"], ["--override-kv", "a=int:x"], ["-ngl", "some"],
    ["--chat-template-kwargs", "[1]"],
    *(["--chat-template-kwargs", f'{{"{name}": 1}}'] for name in ("messages", "strftime_now")),
    ["--chat-template-kwargs", "{"], ["-hff", "x.gguf"],
    ["--rope-scale", "2", "--rope-freq-scale", "0.5"], ["--json", "--jsonl"],
    ["-sys", "a", "-sysf", "b"], ["--graph-mode", "fast"], ["-rea", "maybe"],
])
def test_wrong_uses_have_exit_code_2(path, arguments):
    result = invoke("-m", path, "hello", *arguments)
    assert result.exit_code == 2 and result.stdout == "" and "Error: " in result.stderr


# ---- The environment ----


def test_options_can_be_set_in_the_environment(path):
    assert answer(path, "hello", LLAMAGRAPH_ARG_CTX_SIZE="100")["settings"]["n_ctx"] == 100
    found = answer(path, "hello", LLAMAGRAPH_ARG_TEMP="0.5", LLAMAGRAPH_ARG_TOP_K="7")["settings"]
    assert (found["temp"], found["top_k"]) == (0.5, 7)
    assert answer(path, "-c", 50, "hello", LLAMAGRAPH_ARG_CTX_SIZE="100")["settings"]["n_ctx"] == 50
    result = invoke("hello", "-n", 0, "--json", LLAMAGRAPH_ARG_MODEL=path)
    assert json.loads(result.stdout)["settings"]["model"] == path


@pytest.mark.parametrize("option", SHOWN, ids=lambda p: p.name)
def test_every_option_has_its_names_there(option):
    if option.name in ("help", "version", "list_devices"):
        return
    long = {name[2:].upper().replace("-", "_") for name in option.opts if name.startswith("--")}
    assert long and {f"LLAMAGRAPH_ARG_{name}" for name in long} <= set(option.envvar)


def test_text_from_the_environment_stays_whole(path):
    result = answer(path, "hello", "-n", 3, "--ignore-eos",
                    LLAMAGRAPH_ARG_REVERSE_PROMPT="\nUser: x")
    assert result["stop_reason"] == "limit"


# ---- Model ----


def test_a_file_recommends_and_the_user_decides(tmp_path):
    path = tiny_model(tmp_path / "m.gguf", sampling={"temp": 0.25, "top_k": 5})
    found = answer(path, "hello", "--top-k", 40)["settings"]
    assert (found["temp"], found["top_k"]) == (0.25, 40)


def test_overrides():
    assert read_overrides(("a.b=int:3,c=bool:true", "d=str:x,y", "e=float:1e-3")) == {
        "a.b": 3, "c": True, "d": "x,y", "e": 0.001
    }


def test_override_kv_and_rope_change_the_model(path):
    def logprob(*arguments):
        return answer(path, "-no-cnv", "hello world " * 20, "-n", 1, "--logprobs", 1, "--temp", 0,
                      *arguments)["logprobs"][0][0]["logprob"]

    plain = logprob()
    base = logprob("--override-kv", "llama.rope.freq_base=float:100")
    assert base != plain
    assert logprob("--rope-freq-base", 100) == base
    linear = logprob("--rope-scaling", "linear", "--rope-scale", 4)
    assert linear not in (plain, base)
    assert logprob("--rope-freq-scale", 0.25) == linear
    yarn = ("--rope-scaling", "yarn", "--rope-scale", 4, "--yarn-orig-ctx", 64)
    found = {logprob(*yarn), logprob(*yarn, "--yarn-ext-factor", 0.5),
             logprob(*yarn, "--yarn-beta-fast", 2), logprob(*yarn, "--yarn-beta-slow", 4),
             logprob(*yarn, "--yarn-attn-factor", 2)}
    assert len(found) == 5 and linear not in found
    assert logprob(*yarn, "--yarn-ext-factor", 0) == linear


def test_small_steps_give_the_same_answer(path):
    prompt = "hello world " * 60
    texts = {answer(path, "-no-cnv", prompt, "-n", 8, "--temp", 0, *a)["text"]
             for a in ((), ("-ub", 16), ("-b", 8), ("-ub", 4000))}
    assert len(texts) == 1


def test_check_tensors(path, tmp_path):
    assert answer(path, "hello", "--check-tensors")
    data = bytearray(Path(path).read_bytes())
    data[-4:] = b"\xff\xff\xff\x7f"  # a NaN in the last tensor
    (tmp_path / "bad.gguf").write_bytes(data)
    result = invoke("-m", tmp_path / "bad.gguf", "hello", "--check-tensors")
    assert "blk.2.ffn_down.weight holds numbers that are not finite" in str(result.exception)


@pytest.mark.parametrize("text, name", [
    ("auto", "auto"), ("none", "cpu"), ("CUDA0", "cuda:0"), ("cuda:1", "cuda:1"), ("CPU", "cpu"),
    ("vulkan", "vulkan"),
])
def test_device_names(text, name):
    assert read_device(text) == name


@pytest.mark.parametrize("arguments", [["-ngl", "0"], ["-ngl", "99"], ["-ngl", "all"],
                                       ["-ngl", "auto"], ["-fa"], ["-fa", "on"], ["--warmup"],
                                       ["-fit", "on"], ["--fit", "off"]])
def test_accepted_for_llama_cpps_sake(path, arguments):
    result = invoke("-m", path, "hello", "-n", 2, *arguments)
    assert result.exit_code == 0
    assert ("there is no GPU" in result.stderr) == (arguments[-1] == "99")


def test_an_unknown_device_is_named(path):
    assert "vulkan" in str(invoke("-m", path, "hello", "-dev", "vulkan").exception)


# ---- Prompt ----


def prompt_of(path, *arguments, stdin=None):
    result = invoke("-m", path, *arguments, "-n", 0, "--json", stdin=stdin)
    return json.loads(result.stdout)["prompt_tokens"]


def test_escapes():
    assert unescape(r"a\nb\tc\\n\'\"\x41\q") == "a\nb\tc\\n'\"A\\q"


def test_escapes_are_for_the_command_line_alone(path, tmp_path):
    (tmp_path / "p.txt").write_text(r"a\nb")
    real = prompt_of(path, "-no-cnv", "a\nb")
    as_is = prompt_of(path, "-no-cnv", "-f", tmp_path / "p.txt")
    assert prompt_of(path, "-no-cnv", r"a\nb") == real != as_is
    assert prompt_of(path, "-no-cnv", "-e", "-p", r"a\nb") == real
    assert prompt_of(path, "-no-cnv", "--no-escape", r"a\nb") == as_is
    assert prompt_of(path, "-no-cnv", stdin=r"a\nb") == as_is


def test_system_prefix_and_suffix(path, tmp_path):
    (tmp_path / "s.txt").write_text("world\n")
    inline = prompt_of(path, "-sys", "world", "hello")
    assert prompt_of(path, "-sysf", tmp_path / "s.txt", "hello") == inline
    hello = prompt_of(path, "hello")
    assert len(inline) > len(hello)
    assert prompt_of(path, "--in-prefix", "h", "--in-suffix", "lo", "el") == hello


def test_templates(path, tmp_path):
    template = "{{ messages[0].content }}{{ tail }}{% if not enable_thinking %}lo{% endif %}"
    (tmp_path / "t.jinja").write_text(template)
    raw, whole = prompt_of(path, "-no-cnv", "hel"), prompt_of(path, "-no-cnv", "hello")
    assert prompt_of(path, "--chat-template", template, "hel") == raw
    assert prompt_of(path, "--chat-template-file", tmp_path / "t.jinja", "hel") == raw
    assert prompt_of(path, "--chat-template", template, "-rea", "off", "hel") == whole
    assert prompt_of(path, "--chat-template", template, "--reasoning-budget", 0, "hel") == whole
    assert prompt_of(path, "--chat-template", template, "--chat-template-kwargs",
                     '{"tail": "lo"}', "hel") == whole
    assert prompt_of(path, "--chat-template", "{{ system }}{{ template }}{{ text }}",
                     "--chat-template-kwargs", '{"system": "h", "template": "el", "text": "lo"}',
                     "other") == whole
    assert prompt_of(path, "--chat-template", "chatml", "hel") == prompt_of(path, "-cnv", "hel")
    result = invoke("-m", path, "--chat-template", "nowhere", "hel")
    assert "there is no chat template 'nowhere'" in str(result.exception)


# ---- Output ----


def test_jsonl_is_a_line_a_token_then_the_whole(path):
    result = invoke("-m", path, "hello", "-n", 5, "--ignore-eos", "--jsonl", "--logprobs", 2)
    *lines, last = map(json.loads, result.stdout.splitlines())
    assert [line["id"] for line in lines] == last["tokens"] and len(lines) == 5
    assert "".join(line["text"] for line in lines) == last["text"]
    assert [line["logprobs"] for line in lines] == last["logprobs"]


def test_special_tokens_are_shown_on_demand(path):
    bias = ("-l", f"{256 + 10 + 1}+1000", "-n", 2, "hello")  # <|im_start|>
    assert answer(path, *bias)["text"] == ""
    assert answer(path, *bias, "-sp")["text"] == "<|im_start|>" * 2


def test_what_stderr_says_is_chosen(path, tmp_path):
    def stderr(*arguments):
        return invoke("-m", path, "hello", "-n", 2, *arguments).stderr

    assert re.fullmatch(r"\[ prompt: .* t/s \]\n", stderr())
    assert stderr("--no-show-timings") == "" == stderr("-lv", 2)
    assert "program rows=" in stderr("-v") and "program rows=" in stderr("-lv", 4)
    perf = stderr("--perf")
    for line in ("load time = ", "prompt eval time = ", "eval time = ", "total time = ",
                 "tokens chosen by chain"):
        assert line in perf
    log = tmp_path / "log.txt"
    assert stderr("--log-file", log, "--log-colors", "on").startswith("\x1b[2m")
    assert re.fullmatch(r"\[ prompt: .* t/s \]\n", log.read_text())
    invoke("-m", tmp_path / "none.gguf", "hello", "--log-file", log)
    assert re.match(r"Error: .*none\.gguf: ", log.read_text())
    assert "cannot be written" in stderr("--log-file", tmp_path)


def test_an_echoed_prompt_can_be_coloured(path):
    plain = invoke("-m", path, "-no-cnv", "hello", "-n", 0, "--display-prompt")
    coloured = invoke("-m", path, "-no-cnv", "hello", "-n", 0, "--display-prompt", "--color", "on")
    assert plain.stdout == "hello\n" and coloured.stdout.startswith("\x1b[33mhello\x1b[0m")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shell_completion(shell):
    environment = os.environ | {"_LLAMAGRAPH_COMPLETE": f"{shell}_source"}
    command = [sys.executable, "-m", "llamagraph"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    if "complete" not in done.stdout:
        pytest.skip(f"click wants to ask {shell} for its version: {done.stderr}")
    environment |= {"_LLAMAGRAPH_COMPLETE": f"{shell}_complete",
                    "COMP_CWORD": "--mirostat" if shell == "fish" else "2",
                    "COMP_WORDS": "llamagraph run --mirostat"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert "--mirostat-ent" in done.stdout
