"""The page that says what works with which model, read off the tests: `python -m scripts.compatibility --check` or `--write`.

A cell says that a test has a case for that model, and nothing else. Columns name a test; its `parametrize` marks name the cases.
No test is run here: `make test` and `make test-long` run them.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common.paths import ROOT

from afterglow.model.fallback.fallback_config import FALLBACK
from afterglow.model.families import FAMILIES, spec_from_config

PAGE = ROOT / "docs" / "compatibility.md"
KITS = "tests.model.families_hf"

HEAD = """# Compatibility

`python -m scripts.compatibility --write` makes this page from the tables that the tests are parametrised with, and a test holds it up to
date. A cell says that a test has such a case with a small random model of that type; empty: there is no such test. Types of models
that are not listed here are refused by name; [quantization.md](quantization.md) lists the kinds of weights.
"""


@dataclass(frozen=True, slots=True)
class Column:
    """A column: the cases of one test. `text` says what the test compares, `parameter` which of its parameters is a model or a format.

    `counted`: a cell says how many cases there are.
    """

    title: str
    text: str
    module: str
    test: str
    parameter: str
    counted: bool = False

    def cases(self) -> list[str]:
        """Return the values of the parameter. Raises: ValueError if the test has no such parameter."""
        function = getattr(importlib.import_module(self.module), self.test)
        for mark in function.pytestmark:
            if mark.name == "parametrize" and self.parameter in _names(mark.args[0]):
                return _values(mark, _names(mark.args[0]).index(self.parameter))
        raise ValueError(f"{self.module}.{self.test} is not parametrised with {self.parameter!r}")


def _names(names: str | Sequence[str]) -> list[str]:
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)


def _values(mark: Any, place: int) -> list[str]:
    """Return the values of a `parametrize` mark at `place` of its parameters, or their ids."""
    found = []
    for number, case in enumerate(mark.args[1]):
        values = getattr(case, "values", case)  # of a pytest.param
        ids = mark.kwargs.get("ids")
        value = values if not isinstance(values, tuple) else values[place]
        found.append(str(list(ids)[number] if ids is not None and not callable(ids) else value))
    return found


COLUMNS = (
    Column(
        "safetensors",
        "configurations whose logits are those of transformers within 1e-4 (float32)",
        "tests.model.test_parity",
        "test_logits_equal_those_of_transformers",
        "case",
        counted=True,
    ),
    Column(
        "GGUF",
        "the same, of a file as llama.cpp's converter writes it",
        "tests.model.test_gguf_models",
        "test_logits_equal_those_of_transformers",
        "case",
        counted=True,
    ),
    Column(
        "tiers",
        "rows from device, host, disk and after a restart give what a full prefill gives, within 1e-4",
        "tests.engine.test_exact_reuse",
        "test_reuse_equals_full_prefill",
        "family",
    ),
    Column(
        "truncation",
        "what remains of a truncated conversation is reused at new positions",
        "tests.engine.test_truncation",
        "test_what_survives_is_embedded_at_new_positions",
        "family",
    ),
    Column(
        "discard",
        "the same of any list of tokens",
        "tests.engine.test_discard",
        "test_what_remains_is_embedded_at_new_positions",
        "family",
    ),
    Column(
        "importance",
        "of a stored prefix only the important rows are loaded",
        "tests.engine.test_selecting",
        "test_a_selection_is_what_it_is_in_memory",
        "family",
    ),
    Column(
        "relay",
        "shared prefixes are read once for several requests, with the same answers",
        "tests.engine.test_relay",
        "test_answers_are_the_same_with_and_without",
        "family",
    ),
    Column(
        "guesses",
        "guessed tokens change no reply, also with rows or weights in 8 bits",
        "tests.engine.test_guessing",
        "test_every_family_and_kind_of_numbers",
        "family",
    ),
    Column(
        "int8 weights",
        "rows of a model with weights in 8 bits are reused as near as rounding lets it",
        "tests.engine.test_quantized",
        "test_reuse_is_as_near_as_rounding_lets_it",
        "family",
    ),
    Column(
        "int8 KV",
        "rows stored in 8 bits are rounded once, whatever tier they come from",
        "tests.engine.test_eight_bits",
        "test_what_is_reused_are_rounded_rows",
        "family",
    ),
)

THROUGH_TRANSFORMERS = (
    Column(
        "replies",
        "greedy replies and log-probabilities of a batch are those of transformers' `generate`, with shared prefixes read once",
        "tests.engine.test_fallback",
        "test_replies_are_those_of_transformers",
        "kind",
    ),
    Column(
        "tiers",
        "rows from device, host, disk and after a restart give what a full prefill gives, within 1e-4",
        "tests.engine.test_fallback",
        "test_reuse_from_every_tier_equals_full_prefill",
        "kind",
    ),
    Column(
        "truncation",
        "what remains of a truncated conversation is reused at new positions, or computed again where the remark says so",
        "tests.engine.test_fallback",
        "test_a_truncated_conversation",
        "kind",
    ),
)

FORMATS = (
    Column(
        "Blocks of GGUF files",
        "mean what the `gguf` library says, and stay blocks",
        "tests.model.test_gguf_models",
        "test_blocks_mean_what_the_library_says",
        "block_format",
    ),
    Column(
        "Quantised safetensors",
        "compute what their dequantised weights compute",
        "tests.model.test_quantized",
        "test_a_checkpoint_is_what_its_weights_are",
        "case",
    ),
    Column(
        "Narrow safetensors",
        "are computed in float32, as transformers does",
        "tests.model.test_parity",
        "test_narrow_checkpoints_are_computed_in_float32",
        "dtype",
    ),
)

# Models that people know each type by.
MODELS = {
    "llama": "Llama 1 to 3.3, SmolLM 1 and 2, Yi, TinyLlama",
    "mistral": "Mistral 7B, Mistral Small 3 (text)",
    "ministral": "Ministral 8B",
    "ministral3": "Ministral 3 (text)",
    "qwen2": "Qwen 2, 2.5",
    "qwen3": "Qwen 3 (dense)",
    "mixtral": "Mixtral",
    "qwen2_moe": "Qwen 1.5 and 2 MoE",
    "qwen3_moe": "Qwen 3 MoE (30B-A3B, 235B-A22B)",
    "olmoe": "OLMoE",
    "gpt_oss": "gpt-oss 20B, 120B",
    "phi": "Phi-2",
    "phi3": "Phi-3, 3.5 and 4 (text, also mini)",
    "smollm3": "SmolLM3",
    "olmo2": "OLMo 2",
    "granite": "Granite 3 (dense)",
    "glm": "GLM-4",
    "glm4": "GLM-4-0414",
    "starcoder2": "StarCoder2",
    "falcon": "Falcon 7B, 40B, 180B, 11B",
    "gpt_neox": "GPT-NeoX, Pythia",
    "gpt2": "GPT-2",
    "opt": "OPT (not 350m)",
    "stablelm": "StableLM 3B, 2",
    "cohere": "Command R, Aya 23",
    "gemma": "Gemma 1",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3 (text: 270M, 1B)",
    "olmo3": "OLMo 3",
    "exaone4": "EXAONE 4",
    "cohere2": "Command R7B, Command A",
}


def kind_of(case: str) -> str:
    """Return the `model_type` of a case of the tests' tables. Raises: KeyError if no table has it."""
    configs = _table("tests.engine.conftest", "FAMILIES")
    return str(configs[case]["model_type"]) if case in configs else _kind_of_prefix(_table(KITS, "CASES")[case][1])


def _table(module: str, name: str) -> Any:
    """Return a table of the tests: they are not type-checked, and imported only here."""
    return getattr(importlib.import_module(module), name)


def _kind_of_prefix(prefix: str) -> str:
    classes = {f"{prefix}{end}".lower() for end in ("ForCausalLM", "LMHeadModel")}
    return next(kind for kind, family in FAMILIES.items() if family.architecture.lower() in classes)


def remarks() -> dict[str, str]:
    """Return what limits the models of each type: what the specs of the tests' cases say."""
    from transformers import AutoConfig

    found: dict[str, dict[str, None]] = {}
    limited: dict[tuple[str, str], list[str]] = {}
    for case, (_, prefix, config) in _table(KITS, "CASES").items():
        kind = _kind_of_prefix(prefix)
        spec, _ = spec_from_config(AutoConfig.for_model(kind, **config).to_dict())
        texts = found.setdefault(kind, {})
        if spec.experts is not None:
            texts["mixture of experts"] = None
        if spec.window is not None:
            texts["windows: attention reads no row before them"] = None
        if spec.score_cap is not None:
            texts["soft-capped scores"] = None
        if spec.sinks:
            texts["attention sinks"] = None
        if spec.unturned:
            texts["layers without positions"] = None
        if not spec.decoupled:
            texts["learned positions: after a truncation the rest is computed again"] = None
        if case in _table(KITS, "LIMITS"):
            limited.setdefault((kind, spec.position_limit_reason), []).append(f"`{case}`")
    for (kind, reason), cases in limited.items():
        found[kind][f"limited contexts in {', '.join(cases)}: {reason}"] = None
    return {kind: "; ".join(texts) for kind, texts in found.items()}


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |")


def table(
    names: Mapping[str, str], columns: Sequence[Column], kinds: Sequence[Sequence[str]], about: Mapping[str, str]
) -> str:
    """Make a table and its legend. `names`: of models, by type; `kinds`: the types of each column's cases; `about`: remarks."""
    lines = [_row(["`model_type`", "models", *(column.title for column in columns), "remarks"])]
    lines.append("|" + "---|" * (len(columns) + 3))
    for kind, name in names.items():
        cells = [
            "" if kind not in found else str(found.count(kind)) if column.counted else "yes"
            for column, found in zip(columns, kinds, strict=True)
        ]
        lines.append(_row([f"`{kind}`", name, *cells, about.get(kind, "")]))
    legend = [f"- {column.title}: {column.text} (`{column.module}.{column.test}`)" for column in columns]
    return "\n".join([*lines, "", *legend])


def model_table() -> str:
    """Make the table of model types that the decoder computes."""
    names = {kind: MODELS[kind] for kind in FAMILIES}
    return table(names, COLUMNS, [[kind_of(case) for case in column.cases()] for column in COLUMNS], remarks())


def fallback_table() -> str:
    """Make the table of model types that run through transformers."""
    names = {kind: f"`{architecture}`" for kind, architecture in FALLBACK.items()}
    kept = _table("tests.engine.test_fallback", "AS_THEY_ARE")
    about = dict.fromkeys(kept, "keys are stored as they are: after a truncation the rest is computed again")
    return table(names, THROUGH_TRANSFORMERS, [column.cases() for column in THROUGH_TRANSFORMERS], about)


def page() -> str:
    """Make the whole page."""
    formats = "\n".join(
        f"- {column.title} {column.text} (`{column.module}.{column.test}`): {'; '.join(dict.fromkeys(column.cases()))}."
        for column in FORMATS
    )
    return (
        f"{HEAD}\n## Models\n\n{model_table()}\n\n## Models through transformers\n\nSlower: their own modules compute all but attention "
        f"([library.md](library.md#other-families-through-transformers)).\n\n{fallback_table()}\n\n## Formats\n\n{formats}\n"
    )


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", action="store_true", help="show what is not up to date; exit code 1 if there is any")
    what.add_argument("--write", action="store_true", help="write the page anew")
    text = page()
    if parser.parse_args(args).write:
        PAGE.write_text(text, "utf-8")
        return 0
    lines = list(
        difflib.unified_diff(PAGE.read_text("utf-8").splitlines(), text.splitlines(), "page", "tests", lineterm="")
    )
    print("\n".join(lines))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
