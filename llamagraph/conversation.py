"""A conversation with a model: messages, and the tokens that they already are in its KV cache.

Each prompt keeps the tokens of the last one and of the answer as they were drawn, as far as the
template still writes them so; what a model has read is not read again. Knows no terminal.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from llamagraph.errors import LlamaGraphError
from llamagraph.files import place_of, replacing
from llamagraph.generation import Generation, Token
from llamagraph.model import Model
from llamagraph.sequence import folded
from llamagraph.text.thinking import Piece, ThinkingText

Message = dict[str, str]
Known = list[tuple[str, list[int]]]
ROLES = ("system", "user", "assistant")
MOST_BYTES = 1 << 28  # of a conversation's file


class State(NamedTuple):
    """A conversation's messages, all tokens that they are, and texts of which they are known."""

    messages: list[Message]
    tokens: list[int]
    known: Known


@dataclass
class Turn:
    """An answer within a conversation: iterate for its tokens, each with its pieces of text.

    It joins the conversation when the iteration ends, also one that is broken off. An answer that
    was stopped before its first token has not been: its question is taken back (`taken_back`).
    """

    conversation: "Conversation"
    answer: Generation
    before: "State"
    thinking: ThinkingText
    thought: str = ""
    said: str = ""
    taken_back: bool = False

    def __iter__(self) -> Iterator[tuple[Token, list[Piece]]]:
        try:
            for token in self.answer:
                yield token, self._add(self.thinking.feed(token.id, token.text))
                if self.conversation.raw and self._reaches_reverse_prompt():
                    self.answer.stop_reason = "stop"
                    break
            if rest := self._add(self.thinking.flush()):
                yield Token(-1, ""), rest
        finally:
            self.conversation.take(self)

    def _add(self, pieces: list[Piece]) -> list[Piece]:
        for thinking, text in pieces:
            if thinking:
                self.thought += text
            else:
                self.said += text
        return pieces

    def _reaches_reverse_prompt(self) -> bool:
        """Raw text ends with the reverse prompt itself: the user writes on from there."""
        stops = self.conversation.reverse_prompts
        return any(stop in self.said[-len(stop) - 8 :] for stop in stops if stop)


@dataclass
class Conversation:
    """Messages in turn. `settings` are arguments of `Model.generate`, and may be changed.

    `template` is a text or name in place of the model's own, `variables` are for it. With `raw`
    there is none: all texts are one, and an answer ends where a `stop` text has been written.
    """

    model: Model
    system: str | None = None
    template: str | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    raw: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # of all there is, also what was dropped
    _known: Known = field(default_factory=list)
    _first: int = 0  # tokens up to the first answer: the most that a full context keeps
    _kept: int | None = None  # those that it does keep
    _again: int = 0

    @property
    def reverse_prompts(self) -> tuple[str, ...]:
        return tuple(self.settings.get("stop", ()))

    @property
    def n_dropped(self) -> int:
        """Tokens that a full context has dropped."""
        if self._kept is None:
            return 0
        return len(self.tokens) - len(folded(self.tokens, self.model.runner.n_ctx, self._kept))

    def ask(self, text: str) -> Turn:
        """The answer to a message; LlamaGraphError, and no message, where it cannot be."""
        before = self._state()
        if text or not self.raw:  # raw text may go on by itself
            self.messages.append({"role": "user", "content": text})
        self._again = 0
        return self._turn(before)

    def again(self) -> Turn:
        """Another answer in place of the last one, by another seed."""
        before, asked = self._state(), list(self.messages)
        if asked and asked[-1]["role"] == "assistant":
            asked.pop()
        if not (asked or (self.raw and self.messages)):  # raw text may have begun with an answer
            raise LlamaGraphError("there is nothing yet to answer again")
        self.messages = asked
        self._again += 1
        return self._turn(before)

    def clear(self) -> None:
        """Forgets all messages but the system message."""
        self._restore(State([], [], []))
        self._first, self._kept = 0, None

    def _state(self) -> State:
        return State(list(self.messages), self.tokens, self._known)

    def _restore(self, state: State) -> None:
        self.messages, self.tokens, self._known = state

    def _turn(self, before: State) -> Turn:
        try:
            answer = self._generation()
        except BaseException:
            self._restore(before)
            raise
        prompt = answer.prompt_tokens
        return Turn(self, answer, before, ThinkingText(self.model.tokenizer, prompt))

    def _generation(self) -> Generation:
        runner, arguments = self.model.runner, dict(self.settings)
        if self.raw:
            arguments.pop("stop", None)
        if (seed := arguments.get("seed")) is not None and seed >= 0:
            arguments["seed"] = seed + self._again
        self.tokens = self._prompt()
        self._first = self._first or len(self._encode(self._written(True, self.messages[:1])))
        keep, most = arguments.get("keep", 0), self._first - self.model.tokenizer.add_bos
        arguments["keep"] = most if keep < 0 else min(keep, most)
        answer = self.model.generate(self.tokens, **arguments)
        self._kept = answer.keep
        if answer.keep is not None:
            answer.prompt_tokens = folded(self.tokens, runner.n_ctx, answer.keep)
        if (n := len(answer.prompt_tokens)) > runner.n_ctx:
            raise LlamaGraphError(f"the conversation takes {n} tokens, the context has "
                                  f"{runner.n_ctx}: clear it, shift it or raise -c")
        return answer

    def _written(self, asks: bool, messages: list[Message]) -> str:
        """Messages as one text, up to where the answer begins if it asks for one."""
        system = self.system
        if self.raw:
            first = [] if system is None else [f"{system}\n"]
            return "".join(first + [message["content"] for message in messages])
        start = [] if system is None else [{"role": "system", "content": system}]
        return self.model.tokenizer.apply_chat_template(
            start + messages, self.template, asks, **self.variables)

    def _prompt(self) -> list[int]:
        text = self._written(True, self.messages)
        tokens = self._encode(text)
        known = [(text, tokens)]
        asked = self._written(False, self.messages)  # templates may drop how answers begin
        if asked != text and text.startswith(asked):
            before = self._encode(asked)
            if tokens[: len(before)] == before:
                known.append((asked, before))
        self._known = known
        return tokens

    def _encode(self, text: str) -> list[int]:
        """The tokens of all messages; the longest known beginning has those it had."""
        tokenizer = self.model.tokenizer
        known = [(len(begin), tokens) for begin, tokens in self._known if text.startswith(begin)]
        if not known:
            return tokenizer.encode(text) if self.raw else tokenizer.encode_chat(text)
        n, tokens = max(known, key=lambda found: found[0])
        return tokens + tokenizer.encode_after(tokens, text[n:])

    def take(self, turn: Turn) -> None:
        """An answer has ended: it is a message now."""
        answer = turn.answer
        if not answer.tokens and answer.stop_reason is None:
            self._restore(turn.before)
            turn.taken_back = True
            return
        decoder = self.model.tokenizer.decoder(special=True)
        text = "".join(map(decoder.feed, answer.tokens)) + decoder.flush()
        message = {"role": "assistant", "content": text if self.raw else turn.said}
        if turn.thought and not self.raw:
            message["reasoning_content"] = turn.thought
        self.messages.append(message)
        self.tokens = self.tokens + answer.tokens
        self._known = [*self._known, (self._known[0][0] + text, self.tokens)]

    def save(self, path: Path) -> None:
        """Writes the messages as JSON. Only a file that holds a conversation is written over."""
        place = place_of(path)
        if place.exists() and place.stat().st_size:
            try:
                _read(place)
            except LlamaGraphError:
                raise LlamaGraphError(f"{path}: is there and holds no conversation; name another "
                                      f"file") from None
        start = [] if self.system is None else [{"role": "system", "content": self.system}]
        found = {"model": self.model.path.name, "messages": start + self.messages}
        text = json.dumps(found, indent=2, ensure_ascii=False) + "\n"
        with replacing(path) as out:
            out.write(text.encode("utf-8", "replace"))  # bytes of a command line may be no text

    def load(self, path: Path) -> None:
        """Takes a saved conversation's place; LlamaGraphError, and no change, for what is none."""
        messages = _read(path)
        self.clear()
        self.system = None
        if messages and messages[0]["role"] == "system":
            self.system = messages.pop(0)["content"]
        self.messages = messages


def _read(path: Path) -> list[Message]:
    """The messages of a file: {"messages": [{"role": ..., "content": ...}, ...]}, or that list."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise LlamaGraphError(f"{path}: is too large for a conversation")
        found = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise LlamaGraphError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise LlamaGraphError(f"{path}: is no conversation: it is not JSON text") from None
    messages = found.get("messages") if isinstance(found, dict) else found
    if not isinstance(messages, list):
        raise LlamaGraphError(f'{path}: is no conversation: it has no list of "messages"')
    return [_message(path, i, message) for i, message in enumerate(messages)]


def _message(path: Path, i: int, found: Any) -> Message:
    """A message with its texts alone."""
    names = ("role", "content", "reasoning_content")
    message = {n: found[n] for n in names if n in found} if isinstance(found, dict) else {}
    if not all(isinstance(text, str) for text in message.values()) or (
            "content" not in message or message.get("role") not in ROLES[i > 0 :]):
        raise LlamaGraphError(f"{path}: is no conversation: message {i + 1} needs a content and "
                              f"a role of {', '.join(ROLES[i > 0 :])}")
    return message
