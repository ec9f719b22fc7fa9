# SPDX-License-Identifier: Apache-2.0
"""A story as one HTML page that needs nothing else, and as Markdown beside its pictures.

The page asks no network and runs no script. Pictures are inline; a number is in the `data-value` of
its cell as in `report.json`, whose whole text is in the page too, as `#report-data`.
"""

import base64
import json
import re
from collections.abc import Mapping
from html import escape

from mprecipes.observe.curves import MUTED, colors_of
from mprecipes.observe.figures import Picture
from mprecipes.observe.story import Cell, Judged, Story, Table

CSS = """
:root { --ink:#1f2430; --muted:#6b7280; --line:#e5e7eb; --soft:#f7f8fa; --good:#0f766e;
  --good-soft:#e6f4f1; --bad:#b91c1c; --bad-soft:#fdecec; --warn:#b45309; --warn-soft:#fdf3e3; }
* { box-sizing:border-box; }
body { margin:0; color:var(--ink); background:#fff; line-height:1.5; font-size:15px;
  font-family:system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif; }
main { max-width:1080px; margin:0 auto; padding:40px 24px 72px; }
h1 { font-size:28px; line-height:1.2; margin:0 0 10px; letter-spacing:-0.01em; }
h2 { font-size:19px; margin:44px 0 12px; letter-spacing:-0.005em; }
.facts { color:var(--muted); margin:0; padding:0; list-style:none; font-size:14px; }
.facts li { display:inline; }
.facts li + li::before { content:"\\00b7"; margin:0 8px; color:#c3c9d4; }
.cards { display:grid; grid-template-columns:repeat(auto-fit,minmax(230px,1fr)); gap:14px;
  margin:28px 0 8px; }
.card { border:1px solid var(--line); border-top:4px solid var(--arm); border-radius:10px;
  padding:14px 16px 16px; background:#fff; }
.card .arm { font-size:13px; color:var(--muted); font-weight:600; }
.card .word { font-size:21px; font-weight:700; margin:2px 0 6px; line-height:1.2; }
.card p { margin:0; font-size:13px; color:#4b5563; overflow-wrap:anywhere; }
.good .word, td.good { color:var(--good); } .bad .word, td.bad { color:var(--bad); }
.warn .word, td.warn { color:var(--warn); } .muted .word, td.muted { color:var(--muted); }
figure { margin:0 0 26px; border:1px solid var(--line); border-radius:10px;
  padding:16px 16px 12px; }
figure img { display:block; width:100%; height:auto; }
figcaption { color:var(--muted); font-size:13px; margin-top:10px; }
.scroll { overflow-x:auto; border:1px solid var(--line); border-radius:10px; }
table { border-collapse:collapse; width:100%; font-size:13px; }
th, td { text-align:left; padding:8px 10px; border-bottom:1px solid var(--line);
  vertical-align:top; }
thead th { background:var(--soft); font-weight:600; color:#374151;
  vertical-align:bottom; line-height:1.3; }
tbody tr:last-child td, tbody tr:last-child th { border-bottom:0; }
td.number { text-align:right; font-variant-numeric:tabular-nums; white-space:nowrap; }
th.number { text-align:right; }
tbody th { font-weight:600; white-space:nowrap; }
.note, .method p { color:#4b5563; font-size:13.5px; }
.note { margin:8px 2px 0; color:var(--muted); font-size:13px; }
footer { margin-top:48px; color:var(--muted); font-size:12.5px; }
@media print { main { padding:0; } figure, .card, .scroll { break-inside:avoid; } }
"""


def render_html(story: Story, pictures: list[Picture]) -> str:
    """Gives the page; ASCII, other characters as references."""
    colors = colors_of(story.runs)
    data = json.dumps(story.data).replace("<", "\\u003c")  # no end tag inside the script element
    parts = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<link rel="icon" href="data:,">',
        f"<title>{escape(story.title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>",
        f"<h1>{escape(story.title)}</h1>",
        '<ul class="facts">' + "".join(f"<li>{escape(f)}</li>" for f in story.facts) + "</ul>",
    ]
    if story.judged:
        cards = "\n".join(_card(each, colors) for each in story.judged)
        parts.append(f'<section class="cards">\n{cards}\n</section>')
    parts += [_table(table) for table in story.tables if table.leads]
    parts += [_figure(picture) for picture in pictures]
    parts += [_table(table) for table in story.tables if not table.leads]
    if story.method:
        paragraphs = "\n".join(f"<p>{escape(text)}</p>" for text in story.method)
        parts.append(f'<section class="method">\n<h2>Method</h2>\n{paragraphs}\n</section>')
    parts.append(
        "<footer>Written by mprecipes. Every number of this page is in report.json, and in the "
        "page itself.</footer>\n</main>"
    )
    parts.append(f'<script type="application/json" id="report-data">{data}</script>')
    parts.append("</body>\n</html>\n")
    return "\n".join(parts).encode("ascii", "xmlcharrefreplace").decode("ascii")


def _card(judged: Judged, colors: Mapping[str, str]) -> str:
    color = colors.get(judged.group, MUTED)
    return (
        f'<article class="card {judged.tone}" style="--arm:{color}">'
        f'<div class="arm">{escape(judged.group)}</div>'
        f'<div class="word">{escape(judged.word)}</div><p>{escape(judged.reason)}</p></article>'
    )


def _figure(picture: Picture) -> str:
    encoded = base64.b64encode(picture.png).decode("ascii")
    return (
        f'<section id="{picture.name}">\n<h2>{escape(picture.title)}</h2>\n<figure>'
        f'<img alt="{escape(picture.title)}" src="data:image/png;base64,{encoded}">'
        f"<figcaption>{escape(picture.caption)}</figcaption></figure>\n</section>"
    )


def _table(table: Table) -> str:
    numeric = [
        any(row[index].value is not None for row in table.rows)
        for index in range(len(table.columns))
    ]
    head = "".join(
        f"<th{_class(is_number)}>{escape(column)}</th>"
        for column, is_number in zip(table.columns, numeric, strict=True)
    )
    rows = "\n".join(
        "<tr>"
        + "".join(_cell(cell, index, numeric[index]) for index, cell in enumerate(row))
        + "</tr>"
        for row in table.rows
    )
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return (
        f'<section id="{table.name}">\n<h2>{escape(table.title)}</h2>\n<div class="scroll"><table>'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>{note}\n</section>"
    )


def _cell(cell: Cell, index: int, is_number: bool) -> str:
    words = [word for word in ("number" if is_number else "", cell.tone) if word]
    value = "" if cell.value is None else f' data-value="{json.dumps(cell.value)}"'
    tag = "th" if index == 0 else "td"
    attribute = f' class="{" ".join(words)}"' if words else ""
    return f"<{tag}{attribute}{value}>{escape(cell.text)}</{tag}>"


def _class(is_number: bool) -> str:
    return ' class="number"' if is_number else ""


def render_markdown(story: Story, pictures: list[Picture], folder: str = "pictures") -> str:
    """Gives the same as Markdown, with links to PNG files in `folder`.

    Args:
        folder: relative to the file it is written to.
    """
    parts = [f"# {_md(story.title)}", " / ".join(map(_md, story.facts))]
    parts += [f"- **{_md(j.group)}: {j.word}**. {_md(j.reason)}" for j in story.judged]
    parts += [markdown_table(table) for table in story.tables if table.leads]
    for picture in pictures:
        image = f"![{picture.title}]({folder}/{picture.name}.png)"
        parts += [f"## {picture.title}", image, picture.caption]
    parts += [markdown_table(table) for table in story.tables if not table.leads]
    if story.method:
        parts += ["## Method", *story.method]
    return "\n\n".join(parts).encode("ascii", "xmlcharrefreplace").decode("ascii") + "\n"


def markdown_table(table: Table) -> str:
    """Gives a table under its heading."""
    lines = [f"| {' | '.join(map(_md, table.columns))} |", "|" + " --- |" * len(table.columns)]
    lines += [f"| {' | '.join(_md(cell.text) for cell in row)} |" for row in table.rows]
    note = [f"\n{table.note}"] if table.note else []
    return "\n".join([f"## {table.title}\n", *lines, *note])


def _md(text: str) -> str:
    """Gives a text that Markdown shows as it is: no cell, no tag, no emphasis of its own."""
    text = escape(" ".join(text.split()), quote=False)
    return re.sub(r"([\\|*`]|(?<=\])\()", r"\\\1", text)
