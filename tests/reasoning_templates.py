"""Chat templates of models that think, in few words: what they write of old reasoning is theirs."""

from __future__ import annotations

from tests.scripted_model import HARMONY_SPECIALS, MISTRAL_SPECIALS

# Reasoning of the turn that goes on is kept (calls and their results belong to it), that of earlier turns is not. With
# `enable_thinking` off the generation prompt begins and ends it.
QWEN = """{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}
{%- endif %}{% endfor %}{% if tools %}<|im_start|>system
{% for t in tools %}{{ t | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and m.reasoning_content and loop.index0 > ns.last %}<think>
{{ m.reasoning_content.strip('\\n') }}
</think>

{% endif %}{{ m.content.lstrip('\\n') }}{% for call in m.tool_calls or [] %}{% if m.content or not loop.first %}

{% endif %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""

# The generation prompt begins the reasoning; the history has none.
R1 = """{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant
{{ m.content.split('</think>')[-1] | trim }}<|im_end|>{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>{% endif %}
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""

# The history keeps all reasoning.
KEPT = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>
{% endif %}{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}{# <think> #}"""

MAGISTRAL = """{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}
{{- m.content }}</s>{% endif %}{% endfor %}{# [THINK] #}"""

HARMONY = """{% for m in messages %}{% if m.role == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{% else %}<|start|>{{ m.role -}}
<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"""

THINK_SPECIALS = ("<think>", "</think>")
TAGGED = "<think>\nThe city is big.\nIt rains.\n</think>\n\n"
# By name: template, special tokens, end of text, and a reply in two parts, reasoning first. The reasoning is always THOUGHT.
THOUGHT = "The city is big.\nIt rains."
FORMATS: dict[str, tuple[str, tuple[str, ...], str, str]] = {
    "qwen": (QWEN, (), "<|im_end|>", TAGGED),
    "qwen_special": (QWEN, THINK_SPECIALS, "<|im_end|>", TAGGED),
    "r1": (R1, THINK_SPECIALS, "<|im_end|>", TAGGED.removeprefix("<think>\n")),
    "kept": (KEPT, THINK_SPECIALS, "<|im_end|>", TAGGED.replace("\n\n", "\n")),
    "magistral": (
        *(MAGISTRAL, (*MISTRAL_SPECIALS, "[THINK]", "[/THINK]"), "</s>"),
        "[THINK]The city is big.\nIt rains.[/THINK]",
    ),
    "harmony": (
        *(HARMONY, HARMONY_SPECIALS, "<|return|>"),
        "<|channel|>analysis<|message|>The city is big.\nIt rains.<|end|><|start|>assistant<|channel|>final<|message|>",
    ),
}
