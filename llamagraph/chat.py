"""From what a person says to the tokens of a prompt. Knows a tokenizer and no model."""

from collections.abc import Sequence

from llamagraph.text import Tokenizer


def chat_tokens(tokenizer: Tokenizer, messages: Sequence[dict]) -> list[int]:
    """The conversation as the model's chat template writes it, ready for the answer."""
    text = tokenizer.apply_chat_template(list(messages), enable_thinking=True)
    return tokenizer.encode_chat(text)


def user_turn(tokenizer: Tokenizer, text: str, system: str | None = None) -> list[int]:
    """One question, behind a system message if there is one."""
    messages = [{"role": "system", "content": system}] if system else []
    return chat_tokens(tokenizer, [*messages, {"role": "user", "content": text}])
