# SPDX-License-Identifier: Apache-2.0
"""Opens a page in headless Chromium, off any network, and says what the browser made of it.

    seen = look_at(folder / "report.html")
    assert seen.console == [] and all(picture.width for picture in seen.pictures)

A script that reads the finished document is added to a copy of the page; the page itself has none.
"""

import json
import re
import shutil
import subprocess
import tempfile
from html import unescape
from pathlib import Path
from typing import NamedTuple

import pytest

PROBE = """
<script>window.addEventListener("load", () => {
  const text = (element) => element.textContent.trim();
  const cells = (row) => [...row.children].map(
    (cell) => ({text: text(cell), value: cell.dataset.value ?? null}));
  const seen = {
    title: document.title,
    pictures: [...document.images].map((each) => (
      {alt: each.alt, width: each.naturalWidth, shown: each.clientWidth})),
    words: [...document.querySelectorAll(".card")].map(
      (card) => [text(card.querySelector(".arm")), text(card.querySelector(".word"))]),
    tables: Object.fromEntries([...document.querySelectorAll("section:has(table)")].map(
      (section) => [section.id, [...section.querySelectorAll("tr")].map(cells)])),
    data: JSON.parse(document.getElementById("report-data").textContent),
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    requests: performance.getEntriesByType("resource").map((each) => each.name.slice(0, 40))
      .filter((name) => !name.startsWith("data:")),
  };
  const place = document.createElement("pre");
  place.id = "seen";
  place.textContent = JSON.stringify(seen);
  document.body.append(place);
});</script>
"""
COMMANDS = ("chromium", "chromium-browser", "google-chrome")


class Seen(NamedTuple):
    """What the browser found in the document, and the errors and warnings in its console."""

    title: str
    pictures: list[dict]
    words: list[list[str]]
    tables: dict[str, list[list[dict]]]
    data: dict
    overflow: int
    requests: list[str]
    console: list[str]


def look_at(page: Path, *, width: int = 1180) -> Seen:
    """Loads a page; skips the test with a message where there is no browser."""
    browser = next(filter(None, map(shutil.which, COMMANDS)), None)
    if browser is None:
        pytest.skip(f"no browser: none of {', '.join(COMMANDS)} (Debian: apt install chromium)")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "page.html"
        text = page.read_text(encoding="utf-8")
        assert text.count("</body>") == 1
        copy.write_text(text.replace("</body>", PROBE + "</body>"), encoding="utf-8")
        command = [
            browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/p",
            f"--window-size={width},2000", "--host-resolver-rules=MAP * ~NOTFOUND",
            "--enable-logging=stderr", "--dump-dom", copy.as_uri(),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.S)
    assert found, done.stderr[-2000:]
    console = re.findall(r"CONSOLE.*", done.stderr)
    return Seen(**json.loads(unescape(found[1])), console=console)
