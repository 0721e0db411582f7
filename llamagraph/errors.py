"""The errors that a user can cause or meet. Knows nothing else of the project.

Every message is one line that names the file, the key or option, and the fix.
"""


class LlamaGraphError(Exception):
    """A mistake or a limit that the user can do something about; shown without a traceback."""


class FormatError(LlamaGraphError):
    """A model file that is damaged, or holds what this program does not support."""


class MemoryLimitError(LlamaGraphError):
    """Something does not fit; the message says how much is needed and how much there is."""


class DeviceError(LlamaGraphError):
    """A device that is missing, too old, or refused a call."""
