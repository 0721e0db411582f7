"""From what a person says to the tokens of a prompt. Knows a tokenizer and no model."""

from collections.abc import Sequence
from typing import Any

from llamagraph.text import Tokenizer


def chat_tokens(tokenizer: Tokenizer, messages: Sequence[dict], template: str | None = None,
                /, **variables: Any) -> list[int]:
    """The conversation as a chat template writes it, ready for the answer.

    `template` is a text or name in place of the model's own, `variables` are for the template.
    """
    text = tokenizer.apply_chat_template(list(messages), template,
                                         **{"enable_thinking": True, **variables})
    return tokenizer.encode_chat(text)


def user_turn(tokenizer: Tokenizer, text: str, system: str | None = None,
              template: str | None = None, /, **variables: Any) -> list[int]:
    """One question, behind a system message if there is one."""
    messages = [{"role": "system", "content": system}] if system else []
    return chat_tokens(tokenizer, [*messages, {"role": "user", "content": text}], template,
                       **variables)
