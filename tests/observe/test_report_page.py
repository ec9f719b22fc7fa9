# SPDX-License-Identifier: Apache-2.0
"""The report as a browser shows it: quiet, with its pictures, and with the numbers of the JSON."""

import json

import pytest

from mprecipes.tools.report import make_report
from tests.browser import look_at
from tests.made_runs import make_arm

pytestmark = pytest.mark.launch


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Three arms: one equivalent, one with a static scale that diverges, one of another order."""
    home = tmp_path_factory.mktemp("report")
    paths = make_arm(home, "fp32")
    paths += make_arm(home, "bf16", tokens_per_second=1500.0, above=[1e-4, -1e-4, 0.0])
    paths += make_arm(home, "fp16", plateau=4.0, loss_scale=1024.0, skipped=[(2, 3), (2,), ()])
    paths += make_arm(home, "fp8", shifted=[0, 1, 0])
    return make_report(paths, home / "out")[0]


@pytest.fixture(scope="module")
def seen(report):
    return look_at(report.html)


def test_the_browser_is_content(seen):
    """No line in its console, no request, nothing wider than the window."""
    assert seen.console == []
    assert seen.requests == []
    assert seen.overflow == 0
    assert seen.title == "Precision modes compared"


def test_a_planted_fault_is_seen(report, tmp_path):
    """The test of the test: a script that fails and a picture that is broken are both noticed."""
    text = report.html.read_text()
    text = text.replace("</main>", "<script>nothing.here()</script></main>")
    text = text.replace("data:image/png;base64,iVBOR", "data:image/png;base64,AAAA", 1)
    (tmp_path / "bad.html").write_text(text)
    found = look_at(tmp_path / "bad.html")
    assert "nothing is not defined" in "".join(found.console)
    assert [picture["width"] for picture in found.pictures].count(0) == 1


def test_every_picture_is_there(seen):
    """Decoded by the browser at its full width, and shown."""
    assert [picture["alt"] for picture in seen.pictures] == [
        "Difference to FP32", "Loss", "Gap to FP32", "Gradient norm", "Loss scale", "Throughput",
        "Peak memory",
    ]  # fmt: skip
    for picture in seen.pictures:
        assert picture["width"] == 1440
        assert 600 < picture["shown"] <= 1080


def test_verdicts_are_the_ones_in_the_json(seen, report):
    """Cards, table and file agree, and say what was planted."""
    data = json.loads(report.data.read_text())
    words = [[arm["arm"], arm["verdict"]["word"]] for arm in data["arms"]]
    assert words == [
        ["fp32", "reference"], ["bf16", "equivalent"], ["fp16", "diverges"],
        ["fp8", "not comparable"],
    ]  # fmt: skip
    assert seen.words == words
    rows = seen.tables["verdicts"][1:]
    assert [[row[0]["text"], row[1]["text"]] for row in rows] == words
    assert seen.data == data


def test_numbers_are_the_ones_in_the_json(seen, report):
    """Each cell's value is the file's to the last digit, and its text is that value rounded."""
    arms = {arm["arm"]: arm for arm in json.loads(report.data.read_text())["arms"]}
    head, *rows = seen.tables["verdicts"]
    names = [cell["text"] for cell in head]
    compared = 0
    for row in rows:
        measures = arms[row[0]["text"]]["measures"]
        for name, key, form in (
            ("final loss", "final_loss", ".4f"), ("spread over seeds", "final_loss", ".4f"),
            ("minus FP32", "loss_difference", "+.4f"),
            ("mean height minus FP32", "mean_height_difference", "+.4f"),
            ("gradient norm / FP32", "grad_norm_ratio", ".3f"),
        ):  # fmt: skip
            value = measures[key]["spread" if name.startswith("spread") else "mean"]
            cell = row[names.index(name)]
            assert float(cell["value"]) == value
            assert cell["text"] == f"{value:{form}}"
            compared += 1
    head, *rows = seen.tables["costs"]
    names = [cell["text"] for cell in head]
    for row in rows:
        value = arms[row[0]["text"]]["measures"]["tokens_per_second_with_saves"]["mean"]
        cell = row[names.index("tokens/s end to end")]
        assert (float(cell["value"]), cell["text"]) == (value, f"{value:,.0f}")
        compared += 1
    assert compared == 24


def test_it_is_readable_on_a_narrow_screen(report):
    """On 480 pixels tables scroll inside themselves, the page does not."""
    assert look_at(report.html, width=480).overflow == 0
