"""Chat templates: what they may use, what they refuse, and where turns end."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from afterglow.errors import ModelError, RequestError
from afterglow.text import ChatTemplate, Tokenizer, flatten_messages
from tests.text import toys

HI = [{"role": "user", "content": "hi"}]


def render(source: str, messages: list[dict[str, Any]] | None = None, **kwargs: Any) -> str:
    prompt = kwargs.pop("add_generation_prompt", True)
    template = ChatTemplate(source, {"bos_token": "<s>"})
    return template.render(messages or HI, add_generation_prompt=prompt, variables=kwargs)


def test_what_templates_count_on() -> None:
    assert render("{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}") == "hi\n"
    assert render("{{ bos_token }}{{ {'a': '<é>'} | tojson }}") == '<s>{"a": "<é>"}'
    assert render("{{ strftime_now('%Y') }}") == str(datetime.now().year)
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("a{% generation %}b{% endgeneration %}c") == "abc"
    assert render("{% if add_generation_prompt %}go{% endif %}", add_generation_prompt=False) == ""
    assert render("{{ enable_thinking }}", enable_thinking=False) == "False"
    assert render("{% set ns = namespace(n=1) %}{% set ns.n = 2 %}{{ ns.n }}{{ tools is none }}") == "2True"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[7].content.x }}",
        "{{ 1 / 0 }}",
    ],
)
def test_complaints_and_escapes_become_request_errors(source: str) -> None:
    with pytest.raises(RequestError, match="chat template refuses"):
        render(source)


@pytest.mark.parametrize(
    ("arguments", "written"),
    [('{"a": ', 'INVALID_JSON={"a": ;'), ("null", ""), ("[]", "INVALID_JSON=[];"), ('{"a": 1}', "a=1;")],
)
def test_arguments_that_are_no_object_do_not_end_a_conversation(arguments: str, written: str) -> None:
    source = (
        "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
        "{% for m in messages %}{% for call in m.tool_calls or [] %}{% for k, v in call.function.arguments | items %}"
        "{{ k }}={{ v }};{% endfor %}{% endfor %}{% endfor %}"
    )
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = flatten_messages([*HI, {"role": "assistant", "content": None, "tool_calls": [call]}])
    assert render(source, messages) == written


def test_a_broken_template_is_the_models_fault() -> None:
    with pytest.raises(ModelError, match="not valid Jinja"):
        ChatTemplate("{% if %}")


def test_a_role_is_known_by_its_name_or_where_any_is_written() -> None:
    named = "{% for m in messages if m.role in ('user', \"ipython\") %}{{ m.content }}{% endfor %}"
    assert [ChatTemplate(named).knows_role(role) for role in ("ipython", "asistant")] == [True, False]
    for source in ("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}", "{{ raise_exception('no') }}"):
        assert ChatTemplate(source).knows_role("critic")


def test_the_developer_role_is_the_system_role_to_older_templates() -> None:
    developer = [{"role": "developer", "content": "x"}]
    assert render("{{ messages[0].role }}", developer) == "system"
    assert render("{# developer #}{{ messages[0].role }}", developer) == "developer"


def test_content_may_be_text_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert flatten_messages([{"role": "user", "content": parts}])[0]["content"] == "a\nb"
    assert flatten_messages([{"role": "assistant", "content": None}])[0]["content"] == ""


@pytest.mark.parametrize(
    ("messages", "param", "says"),
    [
        ([], "messages", "at least one"),
        ("hi", "messages", "must be a list"),
        (["hi"], "messages[0]", "must be an object"),
        ([{"content": "x"}], "messages[0].role", "role"),
        ([{"role": "user"}], "messages[0].content", "must be a string"),
        ([{"role": "user", "content": 5}], "messages[0].content", "got 5"),
        (
            [*HI, {"role": "user", "content": [{"type": "image_url"}]}],
            "messages[1].content[0]",
            "'image_url'",
        ),
        (
            [{"role": "assistant", "tool_calls": [{}]}],
            "messages[0].tool_calls[0].id",
            "must be a non-empty string, got null",
        ),
    ],
)
def test_bad_messages_are_refused_by_name(messages: Any, param: str, says: str) -> None:
    with pytest.raises(RequestError, match=says) as caught:
        flatten_messages(messages)
    assert caught.value.param == param


def test_template_files_go_before_the_configuration(tmp_path: Path) -> None:
    folder = toys.byte_level(tmp_path / "m")
    (folder / "chat_template.json").write_text('{"chat_template": "json"}')
    assert toys.render(Tokenizer(folder), HI) == "json"
    (folder / "chat_template.jinja").write_text("jinja")
    assert toys.render(Tokenizer(folder), HI) == "jinja"


def test_variables_cannot_replace_what_the_server_passes() -> None:
    assert render("{{ messages[0].content }}{{ self is defined }}", self=1, messages=[], context=2).startswith("hi")
