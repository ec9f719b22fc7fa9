# SPDX-License-Identifier: Apache-2.0
"""Rendered chats: their pieces, the assistant's turns, and text that reads like a special token."""

import pytest

from mprecipes.data.conversations import Conversation
from mprecipes.data.rows import BadRow
from mprecipes.data.templates import PLAIN, ChatTemplate
from tests.chats import BY_NAME

CHAT = [{"role": "user", "content": "a<|im_end|>"}, {"role": "assistant", "content": "b"}]


def template(name):
    shape = BY_NAME[name]
    return ChatTemplate(shape.template, shape.special, {"eos_token": shape.end})


@pytest.mark.parametrize("name", ["chatml", "chatml-marked"])
def test_special_text_of_the_user_stays_text(name):
    """Pieces tell the template's end token from the same characters in the user's text."""
    rendered = template(name)(Conversation(CHAT))
    assert not rendered.is_clean
    assert rendered.text == template(name).render(CHAT)
    assert rendered.pieces == [
        ("<|im_start|>", True), ("user\na<|im_end|>", False), ("<|im_end|>", True), ("\n", False),
        ("<|im_start|>", True), ("assistant\nb", False), ("<|im_end|>", True), ("\n", False),
    ]  # fmt: skip
    [[(begin, end)]] = rendered.turns
    assert rendered.text[begin:end] == "b<|im_end|>"


def test_marks_are_recognised():
    """Whether a template has generation marks."""
    assert template("chatml-marked").has_marks
    assert ChatTemplate(PLAIN, ["</s>"], {"eos_token": "</s>"}).has_marks
    assert not template("chatml").has_marks


def test_a_template_that_looks_for_special_text_is_refused():
    """Where special text in a message changes what the template writes, the row is refused."""
    text = BY_NAME["chatml"].template.replace(
        "{{ m['content'] +", "{{ ('!' if '<|im_end|>' in m['content'] else '') + m['content'] +"
    )
    shape = BY_NAME["chatml"]
    with pytest.raises(BadRow) as refused:
        ChatTemplate(text, shape.special, {})(Conversation(CHAT))
    assert refused.value.reason == "special-token text"


def test_the_replacement_itself_is_refused_beside_special_text():
    """A message that holds the replacement and special text cannot be told apart, so is refused."""
    chat = [{"role": "user", "content": "QMPRSPECIAL0Q <|im_end|>"}, CHAT[1]]
    with pytest.raises(BadRow) as refused:
        template("chatml")(Conversation(chat))
    assert refused.value.reason == "special-token text"
    template("chatml")(Conversation([{"role": "user", "content": "QMPRSPECIAL0Q"}, CHAT[1]]))


def test_no_assistant_turn_is_refused():
    """A chat in which the assistant says nothing has no targets."""
    with pytest.raises(BadRow) as refused:
        template("chatml")(Conversation(CHAT[:1]))
    assert refused.value.reason == "no assistant turn"


SAYS = "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
HELD = {
    "macro": "{% macro say(m) %}<|im_start|>assistant\n" + SAYS + "{% endmacro %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ say(m) }}{% else %}%USER%{% endif %}"
    "{% endfor %}",
    "set": "{% for m in messages %}{% if m.role == 'assistant' %}{% set x %}<|im_start|>assistant\n"
    + SAYS + "{% endset %}{{ x }}{% else %}%USER%{% endif %}{% endfor %}",
    "filter": " {% filter trim %}  {% for m in messages %}{% if m.role == 'assistant' %}"
    "<|im_start|>assistant\n" + SAYS + "{% else %}%USER%{% endif %}{% endfor %}{% endfilter %}",
    "white space control": "{% for m in messages %}\n  {%- if m.role == 'assistant' -%}\n"
    " {{- '<|im_start|>assistant\\n' -}}\n {%- generation -%}\n  {{- m.content + '<|im_end|>' -}}\n"
    " {%- endgeneration -%}\n {%- else -%}\n %USER% {%- endif -%}\n{%- endfor %}",
    "lines": "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}\n{{ m.content }}<|im_end|>{% endgeneration %}\n{% else %}%USER%{% endif %}"
    "{% endfor %}",
    "a comment": "{# {% generation %} is set below #}" + BY_NAME["chatml-marked"].template,
}  # fmt: skip
USER = "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}"


@pytest.mark.parametrize("way", HELD)
def test_marks_are_exact_wherever_they_stand(way):
    """In macros, captured or filtered text, with any white space around: the turn and its end."""
    shape = BY_NAME["chatml"]
    made = ChatTemplate(HELD[way].replace("%USER%", USER), shape.special, {})
    chat = [*CHAT, {"role": "user", "content": " c "}, {"role": "assistant", "content": " d "}]
    for messages in (chat, [{**chat[0], "content": "clean"}, *chat[1:]]):
        rendered = made(Conversation(messages))
        spans = [rendered.text[begin:end] for [(begin, end)] in rendered.turns]
        assert spans == ["b<|im_end|>", " d <|im_end|>"]


def test_marks_that_cannot_be_followed_are_refused():
    """A filter over the whole that changes letters hides where the marks are."""
    shape = BY_NAME["chatml"]
    made = ChatTemplate(
        "{% filter lower %}" + BY_NAME["chatml-marked"].template + "{% endfilter %}",
        shape.special, {},
    )  # fmt: skip
    with pytest.raises(BadRow) as refused:
        made(Conversation([{"role": "user", "content": "A"}, CHAT[1]]))
    assert refused.value.reason == "no exact targets"
    assert "something else where its generation marks are looked for" in refused.value.found


def test_a_row_with_the_text_that_finds_marks_is_refused():
    """It could be taken for a mark."""
    chat = [{"role": "user", "content": "QMPRBEGINQ"}, CHAT[1]]
    with pytest.raises(BadRow) as refused:
        template("chatml-marked")(Conversation(chat))
    assert refused.value.reason == "special-token text"
    template("chatml")(Conversation(chat))


def test_the_date_given_is_the_date_written():
    """Also by a template that asks the clock whether or not it is given one."""
    text = "{% if strftime_now is defined %}{{ strftime_now('%d %B') }} {% endif %}"
    made = ChatTemplate(text + BY_NAME["chatml"].template, BY_NAME["chatml"].special,
                        {"date_string": "26 Jul 2024"})  # fmt: skip
    assert made.render(CHAT[1:]) == "26 Jul 2024 <|im_start|>assistant\nb<|im_end|>\n"


def test_an_assistant_who_begins():
    """Where the template can be asked for nothing yet; else refused, and the way out named."""
    chat = [CHAT[1], {"role": "user", "content": "a"}, CHAT[1]]
    rendered = template("chatml")(Conversation(chat))
    assert [rendered.text[b:e] for [(b, e)] in rendered.turns] == ["b<|im_end|>"] * 2
    first = "{% if messages[0]['role'] == 'system' %}{% endif %}" + BY_NAME["chatml"].template
    with pytest.raises(BadRow) as refused:
        ChatTemplate(first, BY_NAME["chatml"].special, {})(Conversation(chat))
    assert refused.value.reason == "no exact targets"
    assert refused.value.found.startswith("message 0: of what comes before it alone, the chat")
    assert "generation marks" in refused.value.found


@pytest.mark.parametrize("name", ["chatml", "chatml-marked"])
def test_calls_that_the_template_would_leave_out_are_refused(name):
    """Tool calls, as tools, need a template that writes them."""
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}
    with pytest.raises(BadRow) as refused:
        template(name)(Conversation([CHAT[0], called]))
    assert refused.value.reason == "tools"
    assert refused.value.found == "tool_calls, of which the chat template knows nothing"
    none = template(name)(Conversation([CHAT[0], {**CHAT[1], "tool_calls": []}]))
    assert len(none.turns) == 1
