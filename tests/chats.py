# SPDX-License-Identifier: Apache-2.0
"""Small conversations, tokenizers and chat templates of the shapes that are in use, and a renderer.

The templates are written here, in the shape of known ones; the renderer does not use them: it knows
each shape as plain Python and says of every character whether the assistant said it.
"""

import random
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from mprecipes.data.tokens import TextTokenizer

Piece = tuple[str, bool, bool]  # text, whether it is a special token, whether it is a target


@dataclass(frozen=True)
class Shape:
    """One way to write a chat.

    Attributes:
        marked: whether the template has generation marks.
        special: special tokens; the first is the BOS where `has_bos`.
    """

    name: str
    template: str
    special: tuple[str, ...]
    end: str
    has_bos: bool = False
    has_system: bool = True
    has_tools: bool = False
    marked: bool = False

    def pieces(self, messages, tools=None) -> list[Piece]:
        return RENDERERS[self.name](messages, tools)


def chatml(messages, tools):
    pieces: list[Piece] = []
    for message in messages:
        mine = message["role"] == "assistant"
        pieces += [("<|im_start|>", True, False), (message["role"] + "\n", False, False)]
        pieces += [(message["content"], False, mine), ("<|im_end|>", True, mine)]
        pieces.append(("\n", False, False))
    return pieces


def llama3(messages, tools):
    pieces: list[Piece] = [("<|begin|>", True, False)]
    for message in messages:
        mine = message["role"] == "assistant"
        pieces += [("<|start_header|>", True, False), (message["role"], False, False)]
        pieces += [("<|end_header|>", True, False), ("\n\n", False, False)]
        pieces += [(message["content"].strip(), False, mine), ("<|eot|>", True, mine)]
    return pieces


def mistral(messages, tools):
    pieces: list[Piece] = [("<s>", True, False)]
    for message in messages:
        if message["role"] == "user":
            pieces.append(("[INST] " + message["content"] + " [/INST]", False, False))
        else:
            pieces += [(" " + message["content"], False, True), ("</s>", True, True)]
    return pieces


def gemma(messages, tools):
    pieces: list[Piece] = [("<bos>", True, False)]
    for message in messages:
        mine = message["role"] == "assistant"
        role = "model" if mine else message["role"]
        pieces += [("<start_of_turn>", True, False), (role + "\n", False, False)]
        pieces += [(message["content"].strip(), False, mine), ("<end_of_turn>", True, mine)]
        pieces.append(("\n", False, False))
    return pieces


def phi(messages, tools):
    pieces: list[Piece] = []
    for message in messages:
        mine = message["role"] == "assistant"
        pieces += [(f"<|{message['role']}|>", True, False), ("\n", False, False)]
        pieces += [(message["content"], False, mine), ("<|end|>", True, mine)]
        pieces.append(("\n", False, False))
    return pieces


def tooled(messages, tools):
    import json

    pieces: list[Piece] = [("<|sys|>", True, False)]
    if messages[0]["role"] == "system":
        pieces.append((messages[0]["content"], False, False))
        messages = messages[1:]
    if tools:
        pieces.append(("\nTools:\n", False, False))
        pieces += [(json.dumps(tool, ensure_ascii=False) + "\n", False, False) for tool in tools]
    pieces.append(("<|stop|>", True, False))
    for message in messages:
        mine = message["role"] == "assistant"
        pieces += [("<|turn|>", True, False), (message["role"] + ":", False, False)]
        pieces.append((message.get("content") or "", False, mine))
        for call in message.get("tool_calls", ()):
            text = "\ncall " + call["function"]["name"] + " "
            pieces.append(
                (text + json.dumps(call["function"]["arguments"], ensure_ascii=False), False, mine)
            )
        pieces.append(("<|stop|>", True, mine))
    return pieces


RENDERERS = {
    "chatml": chatml, "chatml-marked": chatml, "llama3": llama3, "mistral": mistral,
    "gemma": gemma, "phi": phi, "tooled": tooled,
}  # fmt: skip

_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}%BODY%{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_MARKED = (
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}"
    "{% endgeneration %}{{ '\\n' }}{% else %}{{ m['content'] + '<|im_end|>\\n' }}{% endif %}"
)

SHAPES = (
    Shape(
        "chatml", _CHATML.replace("%BODY%", "{{ m['content'] + '<|im_end|>\\n' }}"),
        ("<|im_start|>", "<|im_end|>"), "<|im_end|>",
    ),
    Shape(
        "chatml-marked", _CHATML.replace("%BODY%", _MARKED), ("<|im_start|>", "<|im_end|>"),
        "<|im_end|>", marked=True,
    ),
    Shape(
        "llama3",
        "{{ bos_token }}{% for m in messages %}{{ '<|start_header|>' + m['role'] + '<|end_header|>'"
        " + '\\n\\n' + m['content'] | trim + '<|eot|>' }}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|start_header|>assistant<|end_header|>\\n\\n' }}{% endif %}",
        ("<|begin|>", "<|start_header|>", "<|end_header|>", "<|eot|>"), "<|eot|>", has_bos=True,
    ),
    Shape(
        "mistral",
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
        "{{ '[INST] ' + m['content'] + ' [/INST]' }}{% elif m['role'] == 'assistant' %}"
        "{{ ' ' + m['content'] + eos_token }}{% else %}{{ raise_exception('no system role') }}"
        "{% endif %}{% endfor %}",
        ("<s>", "</s>"), "</s>", has_bos=True, has_system=False,
    ),
    Shape(
        "gemma",
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}"
        "{{ raise_exception('no system role') }}{% endif %}{{ '<start_of_turn>' + "
        "('model' if m['role'] == 'assistant' else m['role']) + '\\n' + m['content'] | trim + "
        "'<end_of_turn>\\n' }}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<start_of_turn>model\\n' }}{% endif %}",
        ("<bos>", "<start_of_turn>", "<end_of_turn>"), "<end_of_turn>", has_bos=True,
        has_system=False,
    ),
    Shape(
        "phi",
        "{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m['content'] + '<|end|>\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}",
        ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), "<|end|>",
    ),
    Shape(
        "tooled",
        "{{ '<|sys|>' }}{% set rest = messages %}{% if messages[0]['role'] == 'system' %}"
        "{{ messages[0]['content'] }}{% set rest = messages[1:] %}{% endif %}{% if tools %}"
        "{{ '\\nTools:\\n' }}{% for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}"
        "{% endif %}{{ '<|stop|>' }}{% for m in rest %}{{ '<|turn|>' + m['role'] + ':' }}"
        "{% if m['content'] %}{{ m['content'] }}{% endif %}{% for c in m['tool_calls'] or [] %}"
        "{{ '\\ncall ' + c['function']['name'] + ' ' }}{{ c['function']['arguments'] | tojson }}"
        "{% endfor %}{{ '<|stop|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|turn|>assistant:' }}{% endif %}",
        ("<|sys|>", "<|turn|>", "<|stop|>"), "<|stop|>", has_tools=True,
    ),
)  # fmt: skip
BY_NAME = {shape.name: shape for shape in SHAPES}


def tokenizer(shape: Shape, *, merges: bool = False, adds_bos: bool = False) -> TextTokenizer:
    """Gives a byte-level tokenizer with the shape's special tokens; ids below 256 are bytes.

    Args:
        merges: train a few merges, so that tokens are longer than a byte.
        adds_bos: add BOS and EOS to every text that is encoded by default.
    """
    vocab = {character: byte for byte, character in bytes_to_unicode().items()}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=merges)
    core.decoder = decoders.ByteLevel()
    if merges:
        trainer = trainers.BpeTrainer(
            vocab_size=420, show_progress=False, initial_alphabet=list(vocab),
        )  # fmt: skip
        core.train_from_iterator([" ".join(WORDS) + " assistant user system [/INST]"] * 9, trainer)
    core.add_special_tokens([AddedToken(each, normalized=False) for each in shape.special])
    bos = shape.special[0] if shape.has_bos else None
    if adds_bos:
        from tokenizers.processors import TemplateProcessing

        ids = [(each, core.token_to_id(each)) for each in (bos, shape.end)]
        core.post_processor = TemplateProcessing(f"{bos} $A {shape.end}", special_tokens=ids)
    hf = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=bos, eos_token=shape.end, pad_token=shape.end,
        additional_special_tokens=list(shape.special),
    )  # fmt: skip
    hf.chat_template = shape.template
    return TextTokenizer(
        shape.name, hf, f"{shape.name}{merges}{adds_bos}", len(hf), hf.eos_token_id
    )


def expected(shape: Shape, messages, tools=None) -> tuple[list[int], list[bool]]:
    """Gives ids and targets of a chat for the tokenizer without merges, by the renderer alone."""
    ids, targets = [], []
    numbers = {token: 256 + index for index, token in enumerate(shape.special)}
    for text, is_special, is_target in shape.pieces(messages, tools):
        some = [numbers[text]] if is_special else list(text.encode("utf-8"))
        ids += some
        targets += [is_target] * len(some)
    targets[0] = False
    return ids, targets


WORDS = [
    "yes",
    "no",
    "the",
    "token",
    "loss",
    "mask",
    "\u00e9t\u00e9",
    "\u4f60\u597d",
    "a",
    "\U0001f600",
]


def conversations(shape: Shape, count: int, *, seed: int = 7, injected: bool = True):
    """Gives random (messages, tools) of 1 to 4 turns; some hold text that reads like a token."""
    draw = random.Random(seed)
    odd = ["  ", "\n", " \t", *(shape.special if injected else ()), "<|x|>", "[INST]"]

    def text() -> str:
        words = [draw.choice(WORDS) for _ in range(draw.randint(1, 9))]
        if draw.random() < 0.3:
            words.insert(draw.randrange(len(words) + 1), draw.choice(odd))
        return " ".join(words)

    found = []
    for _ in range(count):
        messages = []
        if shape.has_system and draw.random() < 0.4:
            messages.append({"role": "system", "content": text()})
        for _ in range(draw.randint(1, 4)):
            messages.append({"role": "user", "content": text()})
            if shape.has_tools and draw.random() < 0.4:
                call = {"name": "look", "arguments": {"q": draw.choice(WORDS)}}
                asked = {"role": "assistant", "tool_calls": [{"function": call}]}
                if draw.random() < 0.5:
                    asked["content"] = text()
                messages += [asked, {"role": "tool", "content": text()}]
            messages.append({"role": "assistant", "content": text()})
        tools = None
        if shape.has_tools and draw.random() < 0.5:
            tools = [{"name": "look", "parameters": {"q": "string"}}]
        found.append((messages, tools))
    return found


def write_jsonl(path: Path, rows) -> Path:
    """Writes rows of (messages, tools), or dicts, as JSON lines in ASCII."""
    import json

    lines = [
        row
        if isinstance(row, dict)
        else {"messages": row[0], **({"tools": row[1]} if row[1] else {})}
        for row in rows
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="ascii")
    return path
