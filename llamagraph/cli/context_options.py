"""Options about the context: what a full one does, and a prompt that is kept in a file."""

import os
from pathlib import Path
from typing import Any

import click

from llamagraph.cli.groups import grouped
from llamagraph.files import place_of

context_options = grouped(
    click.option("--context-shift/--no-context-shift", default=False,
                 help="When the context is full, drop half of what is behind --keep and go on."),
    click.option("--keep", "n_keep", metavar="N", type=click.IntRange(min=-1), default=0,
                 show_default=True,
                 help="First tokens that stay when a context shifts; -1 is the whole prompt."),
    click.option("--prompt-cache", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
                 help="Keep the prompt's KV cache in a file: what it shares with the next run's "
                      "prompt is not read again."),
    click.option("--prompt-cache-all", is_flag=True, help="Keep the answer's in it too."),
    click.option("--prompt-cache-ro", is_flag=True, help="Use the file and leave it as it is."),
    title="Model",
)


class PromptCache:
    """The file of --prompt-cache around one answer; nothing where there is none."""

    def __init__(self, model: Any, answer: Any, options: dict[str, Any], note: Any):
        self._model, self._answer, self._note = model, answer, note
        self._path: Path | None = options["prompt_cache"]
        self._reads_alone = options["prompt_cache_ro"]
        self._all = options["prompt_cache_all"] and not self._reads_alone
        if self._path is None:
            if options["prompt_cache_all"] or self._reads_alone:
                raise click.UsageError("--prompt-cache-all and -ro go with --prompt-cache FILE")
        elif not self._load() and not self._reads_alone:
            answer.prompt_read = self._save

    def _load(self) -> bool:
        """Whether the file has the whole prompt."""
        from llamagraph.sequence import n_shared

        assert self._path is not None
        if not self._reads_alone:
            place_of(self._path)  # what cannot be written is said before a prompt is read
        if not os.path.exists(self._path) or os.path.getsize(self._path) == 0:
            self._note(f"{self._path}: {'is not there' if self._reads_alone else 'is made anew'}")
            return False
        self._model.load_state(self._path)
        prompt = self._answer.prompt_tokens
        n = n_shared(self._model.runner.sequence, prompt)
        self._note(f"{self._path}: has {n} of the prompt's {len(prompt)} tokens")
        return n == len(prompt)

    def _save(self) -> None:
        self._model.save_state(self._path)

    def finish(self) -> None:
        """With --prompt-cache-all: what has been read by now."""
        if self._path is None or not self._all:
            return
        if self._model.runner.n_shifts:
            self._note(f"{self._path}: keeps the prompt alone, for the context has shifted")
        else:
            self._save()
