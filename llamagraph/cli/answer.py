"""An answer on its way to stdout: the arguments that options give it, and how its text is shown."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

import click

if TYPE_CHECKING:
    from llamagraph.text.thinking import Piece, ThinkingText


def answer_arguments(model: Any, options: dict[str, Any]) -> dict[str, Any]:
    """What `Model.generate` gets beside the prompt."""
    rules = options["rules"]
    return {
        "limit": max(options["limit"], -1), "stop": options["stop"],
        "grammar": model.matcher(**rules) if rules else None,
        "ignore_eos": options["ignore_eos"], "logprobs": options["logprobs"],
        "special": options["special"], "keep": options["n_keep"],
        "context_shift": options["context_shift"],
        "reasoning_budget": options["reasoning_budget"], **options["sampling"],
    }


# A terminal obeys control characters, a model's too: there they are shown as signs.
SIGNS = ({c: 0x2400 + c for c in range(32) if chr(c) not in "\n\t"} | {127: 0x2421}
         | dict.fromkeys(range(128, 160), 0xFFFD))


class AnswerText:
    """Writes an answer: thinking dimmed where there are colours, or folded to one line of `note`.

    With neither it is the text as the model writes it, tags and all.
    """

    def __init__(self, out: TextIO, color: bool, fold: bool, note: Callable[[str], None],
                 thinking: "ThinkingText"):
        self._out, self._color, self._fold, self._note = out, color, fold, note
        self._thinking, self._folded = thinking, False
        self._dim = False
        self._last = ""
        self._signs = SIGNS if out.isatty() else {}

    def write(self, text: str, pieces: "list[Piece]") -> None:
        """A token's text, and the same in pieces."""
        if not (self._color or self._fold):
            self._put(text.translate(self._signs))
            return
        for thinking, part in pieces:
            if thinking and self._fold:
                self._folded = True
                continue
            if not thinking:
                self._unfold()
                if self._dim:
                    self._put("\n" if self._last.endswith("\n") else "\n\n")
            shown = part.translate(self._signs)
            self._put(click.style(shown, dim=True) if thinking else shown, part)
            self._dim = thinking

    def _put(self, text: str, shown: str | None = None) -> None:
        if text:
            self._out.write(text)
            self._out.flush()
            self._last = text if shown is None else shown

    def _unfold(self) -> None:
        if self._folded:
            self._note(f"[ thought for {self._thinking.n_tokens} tokens ]")
            self._folded = False

    def end(self) -> None:
        """Ends the last line."""
        self._unfold()
        if not self._last.endswith("\n"):
            self._put("\n")
