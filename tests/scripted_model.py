"""A scripted model: a test double behind the engine's `Runner` that computes as ever, and draws the tokens it was given.

Rows, caches and prompts are real; only the choice of tokens is not the model's. The templates write tools, calls and results in the
forms that families of models use, in few words.
"""

from __future__ import annotations

import json
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

from afterglow.config import CacheConfig, EngineConfig
from afterglow.engine.engine import Engine
from afterglow.engine.runner import TorchRunner
from afterglow.plan.step import Step
from afterglow.request import Request
from afterglow.server.lifecycle.service import Service
from afterglow.server.server_config import ServerConfig
from afterglow.text import ChatTemplate, Tokenizer
from tests.structured_model import random_model
from tests.waiting import wait_for

HERMES = """{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}Tools: {% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call as <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}{% for m in messages %}{% if m.role == 'tool' %}
{%- if loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ m.content }}
</tool_response>{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>
{% endif %}{% elif m.role != 'system' %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}{% if m.content or not loop.first %}

{% endif %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

LLAMA = """<|start_header_id|>system<|end_header_id|>

{% if tools %}Answer with {"name": function name, "parameters": its arguments}.
{% for t in tools %}{{ t | tojson(indent=4) }}
{% endfor %}{% endif %}<|eot_id|>{% for m in messages %}{% if m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>

{{ m.content | tojson }}<|eot_id|>{% elif 'tool_calls' in m %}<|start_header_id|>assistant<|end_header_id|>

{% for call in m.tool_calls %}{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}
{%- endfor %}<|eot_id|>{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}{% if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

MISTRAL = """{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% for m in messages %}
{%- if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}[TOOL_RESULTS]
{{- {"content": m.content, "call_id": m.tool_call_id} | tojson }}[/TOOL_RESULTS]{% elif m.tool_calls is defined %}[TOOL_CALLS][
{%- for call in m.tool_calls %}{% if call.id | length != 9 %}{{ raise_exception('Tool call IDs should have length 9!') }}
{%- endif %}{{ call.function | tojson | replace('}}', '}') }}, "id": "{{ call.id }}"}{% if not loop.last %}, {% endif %}
{%- endfor %}]</s>{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"""

QWEN_XML = """{% if tools %}<|im_start|>system
{% for t in tools %}<function><name>{{ t.function.name }}</name>{% for k, v in t.function.parameters.properties | items %}
<parameter><name>{{ k }}</name></parameter>{% endfor %}</function>
{% endfor %}Call as <tool_call><function=name><parameter=key>value</parameter></function></tool_call><|im_end|>
{% endif %}{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}
<tool_call>
<function={{ call.function.name }}>
{% for k, v in call.function.arguments | items %}<parameter={{ k }}>
{{ v if v is string else v | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

HARMONY = """{% if tools %}<|start|>developer<|message|># Tools
{% for t in tools %}type {{ t.function.name }} = {{ t.function.parameters | tojson }};
{% endfor %}<|end|>{% endif %}{% for m in messages %}{% if m.role == 'tool' %}
{{- '<|start|>functions.' + m.name + ' to=assistant<|channel|>commentary<|message|>' + (m.content | tojson) + '<|end|>' }}
{%- elif m.tool_calls is defined %}{% for call in m.tool_calls %}<|start|>assistant to=functions.{{ call.function.name -}}
<|channel|>commentary json<|message|>{{ call.function.arguments | tojson }}<|call|>{% endfor %}
{%- elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>
{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

LLAMA_SPECIALS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>")
MISTRAL_SPECIALS = (
    *("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "</s>"),
)
HARMONY_SPECIALS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>")


class ScriptedRunner:
    """Draws, for each request in the order of their arrival, the tokens of the next script; then the token that ends.

    `answer` makes the tokens of a reply from its request, where there is no script left.
    """

    def __init__(self, real: TorchRunner, end: int) -> None:
        self.real = real
        self.end = end
        self.free = False  # the model draws its own tokens
        self.scripts: deque[list[int]] = deque()
        self.answer: Callable[[Request], list[int]] = lambda request: []
        self._left: dict[int, deque[int]] = {}

    def register(self, job: int, request: Request, *more: Any) -> None:
        replies = request.sampling.max_tokens > 0  # the engine's own work on prompts takes no script
        said = self.scripts.popleft() if replies and self.scripts else self.answer(request) if replies else []
        self._left[job] = deque(said)
        self.real.register(job, request, *more)

    def run(self, step: Step) -> Any:
        out = self.real.run(step)
        for job in () if self.free else out.result.tokens:
            left = self._left[job]
            out.result.tokens[job] = left.popleft() if left else self.end
        return out

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


@dataclass
class Scripted:
    """A server on a scripted model."""

    engine: Engine
    tokenizer: Tokenizer
    runner: ScriptedRunner
    url: str
    client: openai.OpenAI
    service: Service
    requests: list[Request] = field(default_factory=list)
    said: list[list[int]] = field(default_factory=list)

    def say(self, *replies: str, width: int = 3) -> None:
        """Let the next replies be these: in tokens of at most `width` characters, as no tokenizer would cut them."""
        scripts = [odd_ids(self.tokenizer, reply, width) for reply in replies]
        self.said += scripts
        self.runner.scripts.extend(scripts)

    def answer(self, rule: Callable[[str], str], width: int = 3) -> None:
        """Have `rule` say what the reply to a prompt is, where `say` did not."""

        def tokens(request: Request) -> list[int]:
            return odd_ids(self.tokenizer, rule(self.tokenizer.decode(list(request.prompt), False)), width)

        self.runner.answer = tokens

    def prompt(self) -> str:
        """Return the last prompt as text."""
        return self.tokenizer.decode(list(self.requests[-1].prompt), False)


def odd_ids(tokenizer: Tokenizer, text: str, width: int) -> list[int]:
    """Tokenise a text in pieces of `width` characters, but for its special tokens."""
    specials = [tokenizer.decode([number], False) for number in tokenizer.markers.ids]
    pattern = "(" + "|".join(map(re.escape, sorted(specials, key=len, reverse=True))) + ")"
    ids: list[int] = []
    for number, piece in enumerate(re.split(pattern, text)):
        pieces = [piece] if number % 2 else [piece[at : at + width] for at in range(0, len(piece), width)]
        for each in pieces:
            ids += tokenizer.encode(each, add_special_tokens=False)
    return ids


@contextmanager
def scripted(
    folder: Path, template: str = HERMES, specials: Sequence[str] = (), eos: str = "<|im_end|>", **options: Any
) -> Iterator[Scripted]:
    """Start a server on a model of random weights whose tokens are scripted. `plain`: `specials` are tokens of their own, and are
    not hidden in decoded text. `model`: a real model instead, with another template."""
    plain, context, model = options.pop("plain", False), options.pop("context", 4096), options.pop("model", None)
    if model is None:
        random_model(folder / "model", template=template, specials=specials, eos=eos, context=context)
    if plain:
        state = json.loads((folder / "model/tokenizer.json").read_text())
        for token in state["added_tokens"]:
            token["special"] = token["special"] and token["content"] not in specials
        (folder / "model/tokenizer.json").write_text(json.dumps(state))
    cache = CacheConfig(device_cache=64 << 20, host_cache=64 << 20, disk_cache=0)
    path = model or folder / "model"
    engine = Engine.load(path, EngineConfig(threads=1, cache=cache, speculate="off", quantization="none"), name="model")
    tokenizer = Tokenizer(path)
    if model is not None:
        tokenizer.chat_template = ChatTemplate(template, tokenizer.special_tokens)
    (end,) = tokenizer.encode(eos, add_special_tokens=False)
    runner = ScriptedRunner(engine.parts.runner, end)  # type: ignore[arg-type]
    engine.parts.runner = runner
    engine.start()
    service = Service(engine, tokenizer, ServerConfig(port=0, grace=0.5, **options), path)
    thread = threading.Thread(target=service.run, kwargs={"signals": False})
    thread.start()
    wait_for(lambda: service.started)
    with openai.OpenAI(base_url=f"{service.address}/v1", api_key="none", max_retries=0, timeout=30) as client:
        server = Scripted(engine, tokenizer, runner, service.address, client, service)
        submit = engine.submit
        engine.submit = lambda request, sink: (server.requests.append(request), submit(request, sink))[1]  # type: ignore
        try:
            yield server
        finally:
            service.stop()
            thread.join(20)
            engine.close()
