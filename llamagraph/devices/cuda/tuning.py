"""What `scripts/tune` measured on a GPU: a small file in the cache folder for each kind of GPU.

Knows no kernel: a matrix is a text, with the two numbers that are best for it.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

from llamagraph.gguf.hub import cache_folder

Tuning = tuple[tuple[str, int, int], ...]


def tuning_file(gpu: str) -> Path:
    """Where the figures of a GPU of that name lie."""
    return cache_folder() / "tuning" / f"{re.sub('[^A-Za-z0-9]+', '-', gpu)}.json"


def read_tuning(path: Path, warn: Callable[[str], None]) -> Tuning:
    """The figures; none where there is no file, or, with a line to `warn`, a damaged one."""
    try:
        found = json.loads(path.read_text())
        return tuple((str(key), int(teams), int(split)) for key, (teams, split) in found.items())
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, TypeError, AttributeError) as error:
        warn(f"{path}: is damaged ({error}); delete it, or run scripts/tune again")
        return ()


def write_tuning(path: Path, tuning: Tuning) -> None:
    """Puts the figures in place in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps({key: [teams, split] for key, teams, split in tuning}, indent=1))
    new.replace(path)
