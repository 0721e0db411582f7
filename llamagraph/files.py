"""Files that take another one's place once they are whole. Knows nothing of what is in them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from llamagraph.errors import LlamaGraphError


def unwritable(path: Path, error: Exception) -> LlamaGraphError:
    reason = error.strerror if isinstance(error, OSError) else error
    return LlamaGraphError(f"{path}: cannot be written: {reason}")


def place_of(path: Path) -> Path:
    """Where a file of this name would lie, links followed: they stay, what they name is replaced.

    Raises LlamaGraphError for what cannot be one: a folder, a device, a name in a missing folder.
    """
    try:
        place = path.resolve()
        if place.exists() and not place.is_file():
            raise LlamaGraphError(f"{path}: cannot be written: it is there and is not a file")
        place.parent.stat()
    except (OSError, ValueError, RuntimeError) as error:  # ValueError: a NUL; or links in a circle
        raise unwritable(path, error) from None
    return place


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write; the old one stays until the block has ended well.

    Raises LlamaGraphError where it cannot be written.
    """
    place = place_of(path)
    temporary = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        with temporary.open("xb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(place)
    except OSError as error:
        raise unwritable(path, error) from None
    finally:
        with suppress(OSError):
            temporary.unlink()
