# SPDX-License-Identifier: Apache-2.0
"""The page is whole in itself, escapes what it is given, and holds its numbers unrounded."""

import html.parser
import json
import re

import pytest

from mprecipes.observe.figures import Picture
from mprecipes.observe.page import render_html, render_markdown
from mprecipes.observe.story import Cell, Table
from tests.stories import story

PICTURE = Picture("loss", "Loss", "Thin and bold.", b"\x89PNG not really")


class Checked(html.parser.HTMLParser):
    """Fails on tags that do not nest; collects attributes that name something elsewhere."""

    VOID = ("meta", "link", "img")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.links += [value for name, value in attributes if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture
def page():
    return render_html(story(), [PICTURE])


def test_nothing_is_fetched(page):
    """Every picture is inline, and there is no link, import or script that runs."""
    assert [link[:15] for link in Checked(page).links] == ["data:,", "data:image/png;"]
    assert "http" not in page
    assert re.findall(r"<script([^>]*)>", page) == [' type="application/json" id="report-data"']
    assert "url(" not in page and "@import" not in page


def test_texts_are_escaped(page):
    """What looks like markup is shown as it is; the data cannot end its element."""
    assert "<h1>Modes &lt;compared&gt;</h1>" in page
    assert "a recipe &amp; its data" in page
    assert page.count("</script>") == 1
    data = re.search(r'id="report-data">(.*)</script>', page)
    assert json.loads(data[1]) == {"schema": 1, "text": "</script>"}


def test_numbers_are_there_in_full(page):
    """Shown as 2.5012, held as 2.50123456789."""
    assert '<td class="number" data-value="2.50123456789">2.5012</td>' in page
    assert '<div class="word">equivalent</div>' in page


def test_other_alphabets_arrive(page):
    """The file is ASCII; a name that is not is written as references."""
    text = render_html(story(title="Gro\u00dfe Modelle"), [])
    assert text.isascii()
    assert "Gro&#223;e Modelle" in text


def test_what_leads_stands_before_the_pictures():
    """A leading table, the picture, then the others."""
    tables = [*story().tables, Table("more", "More", ("a",), [[Cell("x")]])]
    page = render_html(story(tables=tables), [PICTURE])
    places = [page.index(mark) for mark in ('id="losses"', 'id="loss"', 'id="more"', "Method")]
    assert places == sorted(places)


def test_markdown_tells_the_same():
    """Verdict, table and picture; a bar inside a cell does not split it."""
    text = render_markdown(story(), [PICTURE])
    assert "- **bf16: equivalent**. faster \\| equal" in text
    assert "| arm | loss |\n| --- | --- |\n| fp32 | 2.5000 |\n| bf16 | 2.5012 |" in text
    assert "![Loss](pictures/loss.png)" in text
    assert text.index("## Losses") < text.index("## Loss\n") < text.index("## Method")
