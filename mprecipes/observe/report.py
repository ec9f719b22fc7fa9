# SPDX-License-Identifier: Apache-2.0
"""Writes a report: `report.html`, `report.md`, `report.json` and `pictures/*.png`, in one folder.

The HTML page is complete in itself and may be mailed; the Markdown needs `pictures/` beside it.
Writing again replaces these files and touches no others.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mprecipes.errors import ConfigError
from mprecipes.observe.figures import draw_all
from mprecipes.observe.page import render_html, render_markdown
from mprecipes.observe.story import Story


@dataclass(frozen=True)
class Written:
    """Where a report lies."""

    html: Path
    markdown: Path
    data: Path
    pictures: list[Path]


def write_report(story: Story, folder: Path) -> Written:
    """Draws and writes a report; blocks for a second or two.

    Raises:
        ConfigError: the folder cannot be written.
    """
    pictures = draw_all(story)
    html, markdown, data = (folder / f"report.{kind}" for kind in ("html", "md", "json"))
    try:
        (folder / "pictures").mkdir(parents=True, exist_ok=True)
        paths = []
        for picture in pictures:
            paths.append(folder / "pictures" / f"{picture.name}.png")
            paths[-1].write_bytes(picture.png)
        data.write_text(json.dumps(story.data, indent=1) + "\n", encoding="ascii")
        markdown.write_text(render_markdown(story, pictures), encoding="ascii")
        html.write_text(render_html(story, pictures), encoding="ascii")
    except OSError as error:
        raise ConfigError(
            f"{error.strerror} ({Path(error.filename or folder).name})",
            expected="a folder that can be made and written",
            where=f"the report's folder {folder}",
            action="name another --output_dir, or correct its permissions or free space",
        ) from error
    return Written(html, markdown, data, paths)


def plain(value: Any) -> Any:
    """Gives a value as strict JSON has it: what is not finite becomes the text "nan" or "inf"."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value
