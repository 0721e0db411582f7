"""Stop strings: text as it comes, cut where one begins. Knows no tokens."""

from collections.abc import Sequence


class StopText:
    """Cuts text at the first of some strings; what may yet become one is held back."""

    def __init__(self, stops: Sequence[str]):
        self._stops = [s for s in stops if s]
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """The text that can be shown now."""
        held = self._held + text
        found = [i for s in self._stops if (i := held.find(s)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return held[: min(found)]
        n = max((self._overlap(held, s) for s in self._stops), default=0)
        self._held = held[len(held) - n :]
        return held[: len(held) - n]

    def flush(self) -> str:
        """What was held back, at the end."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """How many characters at the end of text begin the stop string."""
        return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1)
                     if text.endswith(stop[:n])), 0)
