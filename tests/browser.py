"""A headless Chromium for the tests of pages."""

import json
import re
import subprocess
import urllib.request


class Browser:
    """A headless Chromium, through chromedriver's HTTP interface (W3C WebDriver)."""

    def __init__(self, width, height):
        self.process = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE,
                                        stderr=subprocess.DEVNULL, text=True)
        line = next(x for x in self.process.stdout if "on port" in x and "success" in x)
        port = re.search(r"on port (\d+)", line)[1]
        self.base = f"http://127.0.0.1:{port}/session"
        flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},{height}"]
        wanted = {"alwaysMatch": {"goog:chromeOptions": {"args": flags}}}
        self.base += "/" + self.ask("POST", "", {"capabilities": wanted})["sessionId"]

    def ask(self, method, command, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + command, data, method=method,
                                         headers={"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def open(self, file):
        self.ask("POST", "/url", {"url": file.as_uri()})

    def js(self, code, *args):
        return self.ask("POST", "/execute/sync", {"script": code, "args": list(args)})

    def point(self, selector, press=False):
        """Moves the pointer to an element's middle; presses there."""
        x, y = self.js("const b = document.querySelector(arguments[0]).getBoundingClientRect();"
                       "return [b.x + b.width / 2, b.y + b.height / 2].map(Math.round)", selector)
        moves = [{"type": "pointerMove", "x": x, "y": y, "duration": 0}]
        if press:
            moves += [{"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}]
        self.ask("POST", "/actions", {"actions": [
            {"type": "pointer", "id": "mouse", "actions": moves}]})

    def type(self, text):
        keys = [{"type": t, "value": c} for c in text for t in ("keyDown", "keyUp")]
        self.ask("POST", "/actions", {"actions": [{"type": "key", "id": "k", "actions": keys}]})

    def count(self, selector):
        return self.js("return document.querySelectorAll(arguments[0]).length", selector)

    def close(self):
        self.ask("DELETE", "")
        self.process.terminate()
        self.process.wait(10)
        self.process.stdout.close()
