"""Chat templates against llama.cpp's prompts, and templates that mean no good."""

import contextlib
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from llamagraph.errors import FormatError, LlamaGraphError
from llamagraph.gguf.reader import GGUFFile
from llamagraph.text import Tokenizer
from llamagraph.text.templates import KEY, ChatTemplates, fold_system

DAY = datetime(2026, 11, 29)
GIVEN: dict[str, Any] = {
    "strftime_now": DAY.strftime,
    "date_string": "29 Nov 2026",
    "enable_thinking": True,
}
HELLO = [{"role": "user", "content": "Hello"}]
TERSE = [{"role": "system", "content": "Be terse."}, *HELLO]
PUBLISHED = (
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
    "HuggingFaceTB-SmolLM3-3B",
    "Qwen-Qwen2.5-7B-Instruct",
    "Qwen-Qwen3-0.6B",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "google-gemma-2-2b-it",
    "meta-llama-Llama-3.1-8B-Instruct",
    "microsoft-Phi-3.5-mini-instruct",
    "mistralai-Mistral-Nemo-Instruct-2407",
    "openai-gpt-oss-120b",
)
OF_MODELS = {"gemma3": "gemma3-base", "qwen": "qwen2.5-coder", "smollm2": "smollm2"}


def render(template, messages=HELLO, chat_template=None, metadata=(), **variables):
    metadata = {**dict(metadata), **({KEY: template} if template is not None else {})}
    templates = ChatTemplates(metadata, "m.gguf", "<s>", "</s>")
    return templates.render(messages, chat_template, True, variables)


def failure(template, **arguments):
    with pytest.raises(LlamaGraphError) as error:
        render(template, **arguments)
    message = str(error.value)
    assert message.startswith("m.gguf: ") and "\n" not in message
    return message


# Against llama.cpp


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_template_gives_llama_cpps_prompts(name, golden):
    data = json.loads((golden / f"templates/{name}.json").read_text("utf-8"))
    templates = ChatTemplates(
        {KEY: data["template"]}, "m.gguf", data["bos_token"], data["eos_token"]
    )
    for case in data["cases"]:
        assert templates.render(case["messages"], None, True, GIVEN) == case["prompt"]


@pytest.mark.parametrize("name", OF_MODELS)
def test_a_models_own_template_gives_llama_cpps_prompts(name, golden, model_path):
    data = json.loads((golden / f"templates/model-{OF_MODELS[name]}.json").read_text("utf-8"))
    with GGUFFile(model_path(name)) as file:
        tokenizer = Tokenizer(file.metadata, "m.gguf")
    assert tokenizer.has_chat_template == (name != "gemma3")
    for case in data["cases"]:
        assert tokenizer.apply_chat_template(case["messages"], **GIVEN) == case["prompt"]


def test_the_committed_cases_of_chatml():
    cases = json.loads((Path(__file__).parent / "golden/chatml.json").read_text("utf-8"))
    for case in cases:
        assert render(None, case["messages"]) == case["prompt"]


# Which template


def test_variants_by_name():
    metadata = {f"{KEY}.tool_use": "tools", f"{KEY}.rag": "documents"}
    assert render("own", chat_template="tool_use", metadata=metadata) == "tools"
    assert render("own", metadata=metadata) == "own"
    assert render("own", chat_template="default") == "own"
    assert render("own", chat_template="chatml").startswith("<|im_start|>user\nHello")


def test_a_template_as_text():
    assert render("own", chat_template="{{ bos_token }}!") == "<s>!"


def test_an_unknown_name_lists_those_there_are():
    message = failure("own", chat_template="tool_use", metadata={f"{KEY}.rag": "x"})
    assert message == (
        "m.gguf: there is no chat template 'tool_use'; there are: chatml, default, rag"
    )


def test_a_template_that_is_no_text():
    with pytest.raises(FormatError, match=r"m.gguf: tokenizer.chat_template must be a text"):
        render(7)


# What a template is given


def test_tokens_messages_and_generation_prompt():
    template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ add_generation_prompt }}"
    assert render(template) == "<s>Hello</s>True"


def test_variables_win():
    template = "{{ bos_token }}{{ x }}{{ strftime_now('%Y') }}"
    assert render(template, bos_token="B", x=3, **GIVEN) == "B32026"
    assert render("{{ date_string }}", strftime_now=DAY.strftime) == "29 Nov 2026"
    assert render("{{ strftime_now('%Y') }}") == str(datetime.now().year)


def test_blocks_leave_no_lines():
    template = "  {% if true %}\n  a\n  {% endif %}\nb\n"
    assert render(template) == "  a\nb"


def test_extensions_of_transformers():
    loop = "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert render(loop) == "01"
    assert render("{% generation %}{{ 1 }}{% endgeneration %}") == "1"
    assert render("{{ x | tojson }}", x={"é": "<a>"}) == '{"é": "<a>"}'
    assert render("{{ x | tojson(indent=1) }}", x=[1]) == "[\n 1\n]"


def test_loops_macros_and_joined_texts_still_work():
    template = (
        "{% macro twice(x) %}{{ x ~ x }}{% endmacro %}{% for m in messages %}{% for i in [1, 2] %}"
        "{{ twice(m.content) }}{{ '%02d' % i }}{{ '{:>3}'.format(i) }}{{ loop.index }}"
        "{% endfor %}{% else %}none{% endfor %}{{ 1 < 2 <= 2 }}{{ 2 ** 3 * 2 }}"
    )
    assert render(template) == "HelloHello01  11HelloHello02  22True16"


def test_a_long_conversation_fits():
    messages = [{"role": "user", "content": "some words " * 200}] * 1000
    assert len(render(None, messages)) > 2_000_000


# System messages that a template refuses

NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)


def test_a_refused_system_message_goes_before_the_first_user_message():
    messages = [*TERSE, {"role": "assistant", "content": "Hi"}]
    assert render(NO_SYSTEM, messages) == "[user]Be terse.\nHello[assistant]Hi"
    assert messages[1]["content"] == "Hello"
    assert render("{{ messages[0].content }}", TERSE) == "Be terse."


def test_refusals_that_folding_does_not_help():
    assert "no system" in failure(NO_SYSTEM, messages=TERSE[:1])
    assert "never" in failure("{{ raise_exception('never') }}", messages=TERSE)
    assert fold_system(HELLO) is None and fold_system([]) is None
    assert fold_system([TERSE[0], {"role": "user", "content": ["parts"]}]) is None


# Templates that are broken or mean no good


@pytest.mark.parametrize(
    "template, reason",
    [
        ("{% for %}", "Expected an expression"),
        ("{{ a.b.c }}", "'a' is undefined"),
        ("{{ 1 // 0 }}", "division"),
        ("{{ raise_exception('first\nsecond') }}", "first second"),
        ("{{ messages[0].content.nothing() }}", "nothing"),
        ("x" * 100_000, "longer than"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "recursion"),
    ],
)
def test_a_broken_template_is_one_line(template, reason):
    assert reason in failure(template)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception.__globals__['__builtins__'] }}",
        "{{ strftime_now.__globals__.datetime }}",
        "{{ self._TemplateReference__context.environment }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% include '/etc/hostname' %}",
        "{% import 'os' as os %}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(content='x') }}",
        "{{ '{0.__class__}'.format(messages) }}",
    ],
)
def test_no_hidden_attribute_no_file_no_change(template):
    messages = [dict(HELLO[0])]
    with contextlib.suppress(LlamaGraphError):
        assert not render(template, messages).strip()
    assert messages == HELLO


GROWING = "{{% set n = namespace(x={start}) %}}{{% for i in range(60) %}}{step}{{% endfor %}}{end}"


def growing(start, step, end=""):
    return GROWING.format(start=start, step=step, end=end)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(10 ** 9) %}x{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}text{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(50) }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        growing("'a'", "{% set n.x = n.x ~ n.x %}"),
        growing("'a'", "{% set n.x = n.x + n.x %}"),
        growing("[1]", "{% set n.x = n.x + n.x %}"),
        growing("3", "{% set n.x = n.x * n.x %}"),
        growing("'a'", "{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}"),
        growing("[1]", "{% set n.x = [n.x, n.x] %}", "{{ n.x | tojson }}"),
        growing("[1]", "{% set n.x = [n.x, n.x] %}", "{{ n.x == [n.x] }}"),
        "{{ 'a' * 10 ** 9 }}",
        "{{ 9 ** 9 ** 9 ** 9 }}",
        "{{ 'a'.center(10 ** 9) }}",
        "{{ 'a' | center(10 ** 9) }}",
        "{{ [1] | tojson(indent=10 ** 9) }}",
        "{{ 'abc' | slice(10 ** 9) | list }}",
        "{{ (5).to_bytes(10 ** 9, 'big') }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (10 ** 9, 1) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10 ** 9) }}",
        "{% set x = 'a' * 100000 %}{{ x.replace('a', x) }}",
        "{% set x = 'a' * 100000 %}{{ x.translate({97: x}) }}",
        "{% set x = 'a' * 1000000 %}{{ ([x] * 100000) | join }}",
        "{% set x = 'a' * 1000000 %}{{ ('%(a)s' * 100000) % {'a': x} }}",
    ],
)
def test_a_template_without_bounds_ends(template):
    assert "the chat template failed" in failure(template)


def test_a_template_that_failed_leaves_the_next_one_alone():
    templates = ChatTemplates({KEY: "{{ 'a' * 10 ** 9 }}"}, "m.gguf", "", "")
    with pytest.raises(LlamaGraphError):
        templates.render(HELLO, None, True, {})
    assert templates.render(HELLO, "chatml", True, {}).endswith("<|im_start|>assistant\n")
