# SPDX-License-Identifier: Apache-2.0
"""Ids and targets of conversations, against a renderer that knows no template."""

import numpy as np
import pytest

from mprecipes.data.chat import ChatEncoder, find_template
from mprecipes.data.conversations import Conversation
from mprecipes.data.rows import BadRow
from mprecipes.data.tokens import load_tokenizer
from mprecipes.errors import DataError
from tests.chats import BY_NAME, SHAPES, conversations, expected, tokenizer


def encoder(shape, **options):
    made = {key: options.pop(key) for key in ("merges", "adds_bos") if key in options}
    return ChatEncoder(tokenizer(shape, **made), shape.template, **options)


def chat(*turns):
    return Conversation([{"role": role, "content": text} for role, text in turns])


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_five_hundred_random_conversations_per_shape(shape):
    """Every id and every target equals what the renderer writes, injected special text included."""
    encode, wrong = encoder(shape), []
    for messages, tools in conversations(shape, 500):
        ids, targets = expected(shape, messages, tools)
        found = encode(Conversation(messages, tools))
        if found.ids.tolist() != ids or found.targets.tolist() != targets:
            wrong.append((messages, found))
        assert found.num_unended == 0
    assert wrong == []


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_ids_are_those_of_the_tokenizer_with_merges(shape):
    """With a trained vocabulary ids are apply_chat_template's, and targets what was said."""
    encode = encoder(shape, merges=True)
    hf = encode.tokenizer.hf
    for messages, tools in conversations(shape, 60, injected=False):
        found = encode(Conversation(messages, tools))
        whole = hf.apply_chat_template(messages, tools=tools, tokenize=True, return_dict=False)
        assert found.ids.tolist() == whole
        said = "".join(text for text, _, mine in shape.pieces(messages, tools) if mine)
        assert hf.decode(found.ids[found.targets]) == said


def test_a_planted_shift_is_seen():
    """Sabotage: targets one token late are not what the renderer writes."""
    shape = BY_NAME["chatml"]
    messages, tools = conversations(shape, 1)[0]
    found = encoder(shape)(Conversation(messages, tools))
    assert np.roll(found.targets, 1).tolist() != expected(shape, messages, tools)[1]


def test_only_the_last_turn():
    """With loss_on last, the targets are those of the last assistant turn."""
    shape = BY_NAME["llama3"]
    found = encoder(shape, loss_on="last")(
        chat(("user", "a"), ("assistant", "first"), ("user", "b"), ("assistant", "second"))
    )
    assert bytes(found.ids[found.targets][:-1].tolist()) == b"second"
    assert found.ids[found.targets][-1] == 256 + 3


def test_only_the_completion_and_everything():
    """completion needs a prompt and leaves its assistant turns out; all is all but the first."""
    shape = BY_NAME["chatml"]
    turns = chat(("user", "a"), ("assistant", "few"), ("user", "b"), ("assistant", "shot"))
    encode = encoder(shape, loss_on="completion")
    with pytest.raises(BadRow) as refused:
        encode(turns)
    assert refused.value.reason == "no completion"
    found = encode(Conversation(turns.messages, num_prompt=3))
    assert bytes(found.ids[found.targets][:-1].tolist()) == b"shot"
    found = encoder(shape, loss_on="all")(turns)
    assert found.targets.sum() == len(found.ids) - 1
    assert not found.targets[0]


@pytest.mark.parametrize("name", ["chatml", "chatml-marked"])
def test_a_message_of_weight_0_is_shown_and_not_learned(name):
    """Its tokens are there and no targets; where turns or tokens are not told apart, refused."""
    turns = chat(("user", "a"), ("assistant", "bad"), ("user", "b"), ("assistant", "good"))
    turns.messages[1]["weight"], turns.messages[3]["weight"] = 0, 1
    found = encoder(BY_NAME[name])(turns)
    assert bytes(found.ids[found.targets][:-1].tolist()) == b"good"
    assert b"bad" in bytes(each for each in found.ids.tolist() if each < 256)
    turns.messages[3]["weight"] = 0
    for loss_on, reason in (("assistant", "no targets"), ("all", "no exact targets")):
        with pytest.raises(BadRow) as refused:
            encoder(BY_NAME[name], loss_on=loss_on)(turns)
        assert refused.value.reason == reason


def test_an_answer_of_nothing_is_its_end():
    """An empty turn teaches to end at once; nothing is trained on twice or left out."""
    found = encoder(BY_NAME["chatml"])(chat(("user", "a"), ("assistant", ""), ("assistant", "b")))
    assert found.ids[found.targets].tolist() == [257, ord("b"), 257]


def test_plain_text_is_encoded_apart_with_one_eos():
    """A prompt and a completion of text: targets are the completion and the EOS."""
    encode = encoder(BY_NAME["mistral"], adds_bos=True)
    found = encode(Conversation(text=("2+2=", "4</s>")))
    assert found.ids.tolist() == [256, *b"2+2=4</s>", 257]
    assert found.targets.tolist() == [False] * 5 + [True] * 6


def test_a_template_whose_turns_depend_on_what_follows_is_refused():
    """A template that rewrites earlier turns gives no exact targets, and says what to do."""
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] }}{% if loop.last %}{{ 'L' }}"
        "{% endif %}{{ m['content'] + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
    )
    encode = ChatEncoder(tokenizer(BY_NAME["chatml"]), template)
    with pytest.raises(BadRow) as refused:
        encode(chat(("user", "a"), ("assistant", "b")))
    assert refused.value.reason == "no exact targets"
    assert "generation marks" in refused.value.found


def test_a_turn_without_an_end_is_refused():
    """Without an end token a model could not learn to stop."""
    template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
    encode = ChatEncoder(tokenizer(BY_NAME["chatml"]), template)
    with pytest.raises(BadRow) as refused:
        encode(chat(("user", "a"), ("assistant", "b")))
    assert refused.value.reason == "no end of turn"


def test_marks_around_the_content_alone_are_counted():
    """Marks that leave the end token out are taken as they are, and counted as unended."""
    template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
        "{% endgeneration %}{{ '<|im_end|>' }}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    )
    found = ChatEncoder(tokenizer(BY_NAME["chatml"]), template)(
        chat(("user", "a"), ("assistant", "b"))
    )
    assert found.targets.tolist() == [False, True, False]
    assert found.num_unended == 1


def test_tools_need_a_template_that_shows_them():
    """Tools given to a template without them are refused, not dropped."""
    with pytest.raises(BadRow) as refused:
        encoder(BY_NAME["chatml"])(
            Conversation(chat(("user", "a"), ("assistant", "b")).messages, [{"name": "look"}])
        )
    assert refused.value.reason == "tools"


def test_a_refusing_template_is_quoted():
    """What a template raises is the reason of the row."""
    with pytest.raises(BadRow) as refused:
        encoder(BY_NAME["gemma"])(chat(("system", "s"), ("user", "a"), ("assistant", "b")))
    assert "no system role" in refused.value.found


def test_two_bos_are_refused():
    """A template that writes the BOS twice is refused."""
    shape = BY_NAME["llama3"]
    encode = ChatEncoder(tokenizer(shape), "{{ bos_token }}" + shape.template)
    with pytest.raises(BadRow) as refused:
        encode(chat(("user", "a"), ("assistant", "b")))
    assert refused.value.reason == "two BOS"


def test_bytes_have_a_template_of_their_own(tmp_path):
    """The byte tokenizer uses the plain template; a file or the name plain chooses another."""
    bytes_tokenizer = load_tokenizer("bytes")
    text = find_template(bytes_tokenizer, None)
    found = ChatEncoder(bytes_tokenizer, text)(chat(("user", "a"), ("assistant", "b")))
    assert bytes(found.ids[:-3].tolist()) == b"user:\na\nassistant:\n"
    assert found.ids[found.targets].tolist() == [ord("b"), 256]
    file = tmp_path / "own.jinja"
    file.write_text("{{ 'x' }}")
    chosen = tokenizer(BY_NAME["phi"])
    assert find_template(chosen, str(file)) == "{{ 'x' }}"
    assert find_template(chosen, "plain") == text
    assert find_template(chosen, None) == BY_NAME["phi"].template


def test_no_template_and_a_date_are_refused(tmp_path):
    """Both say what to put into the option chat."""
    hf = tokenizer(BY_NAME["phi"])
    hf.hf.chat_template = None
    with pytest.raises(DataError) as error:
        find_template(hf, None)
    assert "no chat template" in error.value.found
    assert "chat template" in error.value.expected
    assert error.value.where == "tokenizer phi"
    assert "template: plain" in error.value.action
    with pytest.raises(DataError) as error:
        find_template(hf, str(tmp_path / "absent"))
    assert error.value.where.endswith("absent")
    with pytest.raises(DataError) as error:
        ChatEncoder(hf, "{{ strftime_now('%d') }}")
    assert "date" in error.value.found
    assert "same text" in error.value.expected
    assert error.value.where == "chat template of phi"
    assert "date_string" in error.value.action
    ChatEncoder(hf, "{{ strftime_now('%d') }}", values={"date_string": "1 Jan"})


def test_the_digest_covers_what_decides():
    """Template, loss_on and values each change the digest; the same gives the same."""
    shape = BY_NAME["chatml"]
    same = encoder(shape).digest
    assert same == encoder(shape).digest
    others = {
        encoder(shape, loss_on="last").digest,
        encoder(shape, values={"date_string": "x"}).digest,
        ChatEncoder(tokenizer(shape), BY_NAME["phi"].template).digest,
    }
    assert len(others | {same}) == 4
