# SPDX-License-Identifier: Apache-2.0
"""Functions and their docstrings, cut out of source text."""

import ast

from mprecipes.data.corpus import Document
from mprecipes.data.docstrings import docstring_pairs

SOURCE = '''
class Adder:
    @staticmethod
    def add(a, b):
        """Add two numbers and give the sum of both."""
        total = a + b
        # a comment stays
        total += 0
        return total

def short(a):
    """Too little code to be of any use here."""
    return a

def undocumented(a, b):
    total = a + b
    total += 0
    return total

def brief(a, b):
    """Brief."""
    total = a + b
    total += 0
    return total
'''


def pairs(text):
    return list(docstring_pairs(iter([Document(text, "stdlib/a.py:1")])))


def test_the_docstring_is_cut_out_and_the_rest_is_kept():
    """Decorator and comment stay, indentation goes, and the place is the function's line."""
    [(doc, code, where)] = pairs(SOURCE)
    assert doc == "Add two numbers and give the sum of both."
    assert code == (
        "@staticmethod\ndef add(a, b):\n    total = a + b\n    # a comment stays\n    total += 0\n"
        "    return total"
    )
    assert where == "stdlib/a.py:4"


def test_doubles_and_broken_files_are_left_out():
    """The same function twice is one pair; text that is no Python gives none."""
    assert len(pairs(SOURCE + SOURCE.replace("class Adder", "class Other"))) == 1
    assert pairs("def broken(:\n") == []


def test_form_feeds_do_not_shift_lines():
    """A form feed is no line end for the parser, and none here."""
    [(_, code, _)] = pairs("\n\x0c\n" + SOURCE)
    assert code.startswith("@staticmethod\ndef add")


def test_every_pair_of_a_real_module_parses():
    """What is cut out of the standard library's own text is Python again."""
    import inspect
    import textwrap

    found = pairs(inspect.getsource(textwrap))
    assert [code.splitlines()[0] for _, code, _ in found][:1] == [
        "def wrap(text, width=70, **kwargs):"
    ]
    for _, code, _ in found:
        ast.parse(code)
        assert code.count("\n") >= 2
