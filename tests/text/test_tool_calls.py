"""Calls in the text of replies, in each format, however the text is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest

from afterglow.errors import ConfigError, ModelError
from afterglow.request import CallDelta, Content, Reasoning
from afterglow.text.tool_calls.formats import choose_format
from afterglow.text.tool_calls.harmony import HarmonyParser
from afterglow.text.tool_calls.json_calls import HermesParser, LlamaParser
from afterglow.text.tool_calls.mistral import MistralParser
from afterglow.text.tool_calls.parts import ReplyParser
from afterglow.text.tool_calls.qwen_xml import QwenXmlParser
from tests import scripted_model as kit
from tests.text import toys

TOOLS: dict[str, Any] = {
    "f": {"type": "object", "properties": {"a": {"type": "integer"}, "s": {"type": "string"}}},
    "g": {"type": "object"},
}
Calls = list[tuple[str, str, bool]]  # name, arguments, whether the call has ended


def read(parser: ReplyParser, text: str, width: int) -> tuple[str, str, Calls]:
    content = reasoning = ""
    arguments: dict[int, str] = {}
    pieces = [text[at : at + width] for at in range(0, len(text), width)]
    for part in [part for piece in pieces for part in parser.push(piece)] + parser.flush():
        if isinstance(part, CallDelta):
            assert part.first == (part.index not in arguments)
            arguments[part.index] = arguments.get(part.index, "") + part.arguments
        elif isinstance(part, Reasoning):
            reasoning += part.text
        else:
            assert isinstance(part, Content)
            content += part.text
    assert [call.arguments for call in parser.calls] == list(arguments.values()), "deltas add up"
    return content, reasoning, [(call.name, call.arguments, call.ended) for call in parser.calls]


OPTIONAL: dict[str, Any] = {
    "$defs": {
        "Name": {"enum": ["a", "b"]},
        "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}] * 400},
    },
    "properties": {
        "zip": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "both": {"type": ["string", "integer"]},
        "name": {"$ref": "#/$defs/Name"},
        "old": {"allOf": [{"$ref": "#/$defs/Name"}, {"description": "as pydantic 1 writes it"}]},
        "loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "string"}]},
        "any": {},
    },
}


@pytest.mark.parametrize(
    ("key", "value", "written"),
    [
        ("zip", "12345", '"12345"'),
        ("zip", '{"a": 1}', '"{\\"a\\": 1}"'),
        ("zip", "None", "null"),
        ("zip", "true", '"true"'),
        ("both", "7", "7"),
        ("both", "7.5", '"7.5"'),
        ("name", "7", '"7"'),
        ("old", "7", '"7"'),
        ("loop", "7", "7"),
        ("any", "7", "7"),
    ],
)
def test_a_value_has_a_type_that_its_schema_permits(key: str, value: str, written: str) -> None:
    text = f"<tool_call><function=h><parameter={key}>\n{value}\n</parameter></function></tool_call>"
    _, _, calls = read(QwenXmlParser({"h": OPTIONAL}), text, 4)
    assert calls == [("h", f'{{"{key}": {written}}}', True)]


def test_without_tools_no_message_of_a_channel_is_a_call() -> None:
    text = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
    assert read(HarmonyParser({}), text, 5) == ('{"a": 1}', "", [])
    assert read(HarmonyParser(TOOLS), text, 5)[2] == [("f", '{"a": 1}', True)]


@pytest.mark.parametrize("text", ["<|start|>", "<|start|>assistant"])
def test_the_beginning_of_a_header_is_no_content(text: str) -> None:
    before = "<|channel|>analysis<|message|>Hm.<|end|>"
    assert read(HarmonyParser({}), before + text, 5) == ("", "Hm.", [])


CASES: list[tuple[type[ReplyParser], str, str, Calls]] = [
    (
        HermesParser,
        'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"a": 1, "s": "x}\\"{"}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {"a": [1,{"b":2}]}, "name":"g"}\n</tool_call>',
        "Let me see.",
        [("f", '{"a": 1, "s": "x}\\"{"}', True), ("g", '{"a": [1,{"b":2}]}', True)],
    ),
    (HermesParser, "plain <tool answer ", "plain <tool answer ", []),
    (HermesParser, "<tool_call>nothing</tool_call>x", "<tool_call>nothing</tool_call>x", []),
    (HermesParser, '<tool_call>{"nam', '<tool_call>{"nam', []),
    (HermesParser, '<tool_call>{"name":"f","arguments":{"s": "ab', "", [("f", '{"s": "ab', False)]),
    (HermesParser, '<tool_call>{"x":1}</tool_call> ok', '<tool_call>{"x":1}</tool_call> ok', []),
    (HermesParser, '<tool_call>{"name":"f"}</tool_call>', "", [("f", "{}", True)]),
    (
        HermesParser,
        '<tool_call>{"name":"f","arguments":"{\\"a\\":1}"}</tool_call> then',
        " then",
        [("f", '{"a":1}', True)],
    ),
    (HermesParser, '<tool_call>[{"name":"f"},{"name":"g"}]</tool_call>', "", [("f", "{}", True), ("g", "{}", True)]),
    (
        HermesParser,
        '<tool_call>{"name":"f","arguments":{"s":"</tool_call>"}}',
        "",
        [("f", '{"s":"</tool_call>"}', True)],
    ),
    (LlamaParser, '{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}', True)]),
    (
        LlamaParser,
        '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
        "",
        [("f", '{"a": 1}', True), ("g", "{}", True)],
    ),
    (LlamaParser, '{"name": "other", "parameters": {"a": 1}}', '{"name": "other", "parameters": {"a": 1}}', []),
    (LlamaParser, '{"answer": 42}', '{"answer": 42}', []),
    (LlamaParser, 'hello {"name": "f"}', 'hello {"name": "f"}', []),
    (LlamaParser, '<|python_tag|>search.call(q="x")', 'search.call(q="x")', []),
    (LlamaParser, '{"na', '{"na', []),
    (
        MistralParser,
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        "",
        [("f", '{"a": 1}', True), ("g", "{}", True)],
    ),
    (
        MistralParser,
        'sure[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{"s": "["}',
        "sure",
        [("f", '{"a": 1}', True), ("g", '{"s": "["}', True)],
    ),
    (MistralParser, '[TOOL_CALLS]f[ARGS]{"a": ', "", [("f", '{"a": ', False)]),
    (MistralParser, "[1, 2] ok", "[1, 2] ok", []),
    (
        QwenXmlParser,
        'I go.\n<tool_call>\n<function=f>\n<parameter=a>\n12\n</parameter>\n<parameter=s>\nline "1"\nline </2>\n'
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
        "I go.",
        [("f", '{"a": 12, "s": "line \\"1\\"\\nline </2>"}', True), ("g", "{}", True)],
    ),
    (QwenXmlParser, "<function=f><parameter=s>ab", "", [("f", '{"s": "ab', False)]),
    (QwenXmlParser, "<tool_call>no", "<tool_call>no", []),
    (HarmonyParser, "<|channel|>final<|message|>Hello", "Hello", []),
    (HarmonyParser, " to=functions.g<|channel|>commentary json<|message|>{}<|call|>", "", [("g", "{}", True)]),
    (HarmonyParser, "no channels at all", "no channels at all", []),
]


@pytest.mark.parametrize("width", [1, 2, 3, 7, 1000])
def test_a_reply_is_read_the_same_however_it_is_cut(width: int) -> None:
    for kind, text, content, calls in CASES:
        assert read(kind(TOOLS), text, width) == (content, "", calls), (kind, text)


@pytest.mark.parametrize("width", [1, 3, 1000])
def test_a_reply_that_is_cut_anywhere_has_no_call_but_the_beginnings_of_its_own(width: int) -> None:
    for kind, text, _, calls in CASES:
        for cut in range(len(text)):
            found = read(kind(TOOLS), text[:cut], width)[2]
            assert len(found) <= len(calls)
            assert all(ended for *_, ended in found[:-1])
            for (name, arguments, ended), (whole_name, whole, _) in zip(found, calls, strict=False):
                assert name == whole_name
                assert whole == arguments if ended else whole.startswith(arguments), (kind, text[:cut])


DEEP = "[" * 3000


@pytest.mark.parametrize(
    ("kind", "text", "calls"),
    [
        (HarmonyParser, f" to=functions.g<|channel|>commentary json<|message|>{DEEP}", [("g", DEEP, False)]),
        (MistralParser, f"[TOOL_CALLS]g[ARGS]{DEEP} ", [("g", f"{DEEP} ", False)]),  # "[" may begin a mark
        (QwenXmlParser, f"<function=f><parameter=a>{DEEP}</parameter></function>", [("f", f'{{"a": "{DEEP}"}}', True)]),
        (
            HermesParser,
            f'<tool_call>{{"arguments": {DEEP}{DEEP.replace("[", "]")}, "name": "g"}}</tool_call>',
            [("g", DEEP + DEEP.replace("[", "]"), True)],
        ),
        (LlamaParser, f'{{"name": {DEEP}{DEEP.replace("[", "]")}}}', []),
    ],
    ids=["harmony", "mistral", "qwen", "hermes", "llama"],
)
def test_a_reply_of_brackets_alone_is_read(kind: type[ReplyParser], text: str, calls: Calls) -> None:
    """Python's reader of JSON goes a thousand deep at most."""
    assert read(kind(TOOLS), text, 1000)[2] == calls


def test_thoughts_are_apart() -> None:
    text = (
        "<|channel|>analysis<|message|>hmm<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json"
        '<|message|>{"a":1}'
    )
    assert read(HarmonyParser(TOOLS), text, 4) == ("", "hmm", [("f", '{"a":1}', True)])


def test_one_call_is_enough_where_one_is_wanted() -> None:
    parser = HermesParser(TOOLS, one_call=True)
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    parser.push(call[:-12])
    assert parser.complete
    assert parser.push(call) == parser.flush() == []
    assert len(parser.calls) == 1


def test_what_follows_the_one_call_in_the_same_piece_is_ignored() -> None:
    parser = LlamaParser(TOOLS, one_call=True)
    assert read(parser, '{"name": "f", "parameters": {"a": 1}} and more', 100) == ("", "", [("f", '{"a": 1}', True)])


# ------------------------------------------------------------------------------------------------- which format

TEMPLATE = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<|im_end|>", "content": "text"},
    },
}


@pytest.mark.parametrize(
    ("template", "name", "special"),
    [
        (kit.HERMES, "hermes", False),
        (kit.LLAMA, "llama3_json", True),
        (kit.MISTRAL, "mistral", True),
        (kit.QWEN_XML, "qwen3_coder", False),
        (kit.HARMONY, "openai", True),
        ("{{ tools }}", "hermes", False),
    ],
)
def test_the_template_tells_the_format(template: str, name: str, special: bool) -> None:
    found = choose_format("auto", template)
    assert (found.name, found.special) == (name, special)
    assert len(found.call_id()) == (9 if name == "mistral" else 29)


def test_templates_without_tools_get_the_hermes_format() -> None:
    assert choose_format("auto", kit.LLAMA, own=False).name == "hermes"
    assert choose_format("auto", toys.CHATML, own=False).name == "hermes"


def test_the_operator_has_the_last_word() -> None:
    assert choose_format("mistral", kit.HERMES).name == "mistral"
    with pytest.raises(ConfigError, match="no response_template"):
        choose_format("response_template", kit.HERMES)
    with pytest.raises(ConfigError, match="must be auto or one of"):
        choose_format("other", kit.HERMES)


def test_a_response_template_is_read_by_transformers() -> None:
    pytest.importorskip("transformers.utils.chat_parsing")
    form = choose_format("auto", kit.HERMES, TEMPLATE)
    assert (form.name, form.written) == ("response_template", "hermes")
    text = 'Look.\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    for width in (1, 5, 100):
        content, _, calls = read(form.parser(TOOLS), text, width)
        assert (content, [(name, json.loads(said), ended) for name, said, ended in calls]) == (
            "Look.",
            [("f", {"a": 1}, True)],
        )
    assert read(form.parser(TOOLS), "<tool_call>{no</tool_call>", 3)[2] == []
    assert read(form.parser(TOOLS), f"<tool_call>{DEEP}</tool_call>", 1000)[2] == []
    assert choose_format("auto", kit.HERMES, {"fields": 5}).name == "hermes"
    with pytest.raises(ModelError, match="not valid"):
        choose_format("response_template", kit.HERMES, {"fields": 5})
