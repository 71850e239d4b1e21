"""Opens a page in a browser without a window, runs a script in it and gives back what that found.

The browser is the one inside the wheel of kaleido 0.2.1, a whole Chromium (88) with its libraries. It starts with a
script from the current folder, calls a function in it for every line of JSON on its standard input and prints what
comes back: here the script opens the page in a frame.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-breakpad")
WATCH = """<script>
var errors = [];
window.onerror = function (text) { errors.push(String(text)); };
window.onunhandledrejection = function (event) { errors.push(String(event.reason)); };
console.error = function () { errors.push(Array.from(arguments).join(" ")); };
</script>"""
IN_A_FRAME = """var kaleido_scopes = { plotly: function (spec) { return new Promise(function (done) {
  var frame = document.createElement("iframe");
  frame.style.cssText = "border: 0; width: 1200px; height: 900px";
  frame.onload = async function () {
    try { done({ code: 0, message: null, result: JSON.stringify(await frame.contentWindow.eval(spec.data.script)) }); }
    catch (error) { done({ code: 1, message: String(error) + " " + error.stack, result: null }); }
  };
  frame.srcdoc = spec.data.page;
  document.body.appendChild(frame);
}); } };"""


def carried() -> Path | None:
    """The folder of the browser that kaleido's wheel carries."""
    spec = importlib.util.find_spec("kaleido")
    folders = list(spec.submodule_search_locations or []) if spec else []
    found = [Path(folder) / "executable" for folder in folders]
    return next((folder for folder in found if (folder / "bin" / "kaleido").is_file()), None)


def run(page: str, script: str) -> Any:
    """What `script`, an expression or a call whose promise is awaited, is in the page. `errors` there lists errors."""
    page = page.replace("<head>", f"<head>{WATCH}", 1)
    folder = carried()
    assert folder is not None, "there is no browser"
    with tempfile.TemporaryDirectory() as place:
        return _answer(folder, Path(place), page, script)


def _answer(folder: Path, place: Path, page: str, script: str) -> Any:
    (place / "js").mkdir()
    (place / "js" / "kaleido_scopes.js").write_text(IN_A_FRAME)
    own = {"LD_LIBRARY_PATH": "lib", "FONTCONFIG_PATH": "etc/fonts", "XDG_DATA_HOME": "xdg"}
    environment = {**os.environ, **{name: str(folder / path) for name, path in own.items()}, "HOME": str(place)}
    request = json.dumps({"data": {"page": page, "script": script}}) + "\n"
    command = [str(folder / "bin" / "kaleido"), "plotly", "--plotlyjs=file:///dev/null", *FLAGS]
    streams = {"input": request, "capture_output": True, "text": True, "encoding": "utf-8"}
    done = subprocess.run(command, **streams, cwd=place, env=environment, timeout=120)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == 2 and answers[0]["code"] == 0, done.stdout + done.stderr
    assert answers[1]["code"] == 0, answers[1]["message"]
    return json.loads(answers[1]["result"])
