"""One HTML page that needs nothing else: a template of this package with its title and data.

Knows nothing of what the page shows.
"""

import html
import json
from importlib import resources
from typing import Any


def fill(template: str, title: str, data: Any) -> str:
    """The template's text; no data can end the element that holds it."""
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    head, tail = resources.files("llamagraph").joinpath(template).read_text("utf-8").split("%DATA%")
    return head.replace("%TITLE%", html.escape(title)) + text + tail
