"""Chat templates: messages to the one text that a model was trained on, by the file's own Jinja.

Where a file has no template this is ChatML; where a template refuses a system message, that
message goes in front of the first user message. Does not know tokens, apart from the texts of BOS
and EOS, nor how a template is kept in bounds (sandbox.py).
"""

import threading
from collections.abc import Mapping
from typing import Any

from jinja2 import Template

from ..errors import FormatError, LlamaGraphError
from .sandbox import Refused, Sandbox, TooMuch, strftime_now

KEY = "tokenizer.chat_template"
MAX_TEMPLATE = 1 << 16  # characters; compiling takes longest of all

CHATML = """\
{%- for message in messages -%}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

Messages = list[dict[str, Any]]


class ChatTemplates:
    """The templates of one file: its own ("default"), its `.NAME` variants, and "chatml"."""

    def __init__(
        self, metadata: Mapping[str, Any], source: str, bos_token: str, eos_token: str
    ) -> None:
        self._source = source
        self._texts = {"chatml": CHATML}
        for key in filter(lambda key: key == KEY or key.startswith(f"{KEY}."), metadata):
            if not isinstance(metadata[key], str):
                raise FormatError(f"{source}: {key} must be a text")
            self._texts[key.removeprefix(KEY).removeprefix(".") or "default"] = metadata[key]
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._sandbox = Sandbox()
        self._compiled: dict[str, Template] = {}
        self._lock = threading.Lock()

    def render(
        self,
        messages: Messages,
        chat_template: str | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt, by the named template or template text, else the file's own or ChatML.

        `variables` win over all others. Raises LlamaGraphError where the template is broken,
        refuses the messages or goes past the bounds of the sandbox.
        """
        text = self._text(chat_template)
        given = {"add_generation_prompt": add_generation_prompt, **self._tokens, **variables}
        try:
            with self._lock:
                try:
                    return self._run(text, {"messages": messages, **given})
                except Refused:
                    if (folded := fold_system(messages)) is None:
                        raise
                    return self._run(text, {"messages": folded, **given})
        except Exception as error:  # A template is a program: it may fail in any way.
            reason = " ".join(str(error)[:200].split()) or type(error).__name__
            raise LlamaGraphError(
                f"{self._source}: the chat template failed: {reason}; "
                f"choose another template or change the messages"
            ) from error

    def _text(self, chat_template: str | None) -> str:
        if chat_template is None:
            return self._texts.get("default", CHATML)
        if chat_template in self._texts or "{" not in chat_template:
            try:
                return self._texts[chat_template]
            except KeyError:
                raise LlamaGraphError(
                    f"{self._source}: there is no chat template {chat_template!r}; there are: "
                    f"{', '.join(sorted(self._texts))}"
                ) from None
        return chat_template

    def _run(self, text: str, variables: dict[str, Any]) -> str:
        if text not in self._compiled:
            if len(text) > MAX_TEMPLATE:
                raise TooMuch(f"it is longer than {MAX_TEMPLATE} characters")
            self._sandbox.start(text)
            self._compiled[text] = self._sandbox.from_string(text)
        now = variables.get("strftime_now", strftime_now)
        self._sandbox.start(variables)
        return self._compiled[text].render({"date_string": now("%d %b %Y"), **variables})


def fold_system(messages: Messages) -> Messages | None:
    """The system message's text and a newline put before the first user message, as llama.cpp does.

    None where the first message is not a system message or no user message of text follows.
    """
    if not messages or messages[0].get("role") != "system":
        return None
    rest = [dict(message) for message in messages[1:]]
    user = next((message for message in rest if message.get("role") == "user"), {})
    system, first = messages[0].get("content"), user.get("content")
    if not isinstance(system, str) or not isinstance(first, str):
        return None
    user["content"] = f"{system}\n{first}"
    return rest
