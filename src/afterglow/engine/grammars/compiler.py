"""Compile grammars for one vocabulary, with llguidance, and keep them for the next requests.

Of a JSON schema that cannot be enforced, the error names the part.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from afterglow.engine.grammars.masks import Constraint, Vocabulary
from afterglow.errors import RequestError
from afterglow.json_schema import ENDLESS, SHARED, endless, parts, sharpened
from afterglow.request import Grammar, SamplingParams

MAX_TEXT = 128 * 1024  # characters of a grammar
MAX_KEPT = 64  # grammars, those that were refused too, and in all
MAX_KEPT_TEXT = 1024**2  # characters of them
# White space between the tokens of JSON: none, one space, or a line break with its indentation. Without a limit, a model that
# does not know how to go on would write spaces until the reply is full.
WHITE_SPACE = r"( |\n {0,32}|\n\t{0,8})"
# A grammar is compiled by recursion over its rules. A stack of this size (address space only) is deep enough for MAX_TEXT.
STACK_BYTES = 256 * 1024**2
# Masks are computed while other requests wait for their tokens too: limits of the work on one mask, some milliseconds each.
LIMITS = LLParserLimits(
    max_items_in_row=1000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)

_one_stack = threading.Lock()  # the size of new threads' stacks is the process's


class Grammars:
    """Compile grammars for a model's vocabulary. For any thread."""

    def __init__(self, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self.vocab_size = vocab_size
        self.eos_ids = tuple(eos_ids)
        self._read: Callable[[], str] | None = None
        self._tokenizer: LLTokenizer | None = None
        self._known: OrderedDict[Grammar, LLMatcher | RequestError] = OrderedDict()
        self._lock = threading.Lock()

    def use_tokenizer(self, read: Callable[[], str]) -> None:
        """Take the model's tokenizer. `read` returns it as the text of a `tokenizer.json`, when a request first has a
        grammar."""
        self._read = read

    def check(self, grammar: Grammar | None) -> None:
        """Refuse a grammar that cannot be enforced. May take up to seconds, when a grammar comes for the first time.

        Raises: RequestError, with the path of the offending field.
        """
        if grammar is not None:
            self._compiled(grammar)

    def constraint(self, params: SamplingParams) -> Constraint | None:
        """Make the constraint of a request, at its grammar's beginning; None where it has none. Raises: RequestError."""
        if params.grammar is None:
            return None
        matcher = self._compiled(params.grammar).deep_copy()
        assert self._tokenizer is not None
        vocabulary = Vocabulary(self.vocab_size, self._tokenizer.vocab_size, self.eos_ids)
        return Constraint(matcher, params, vocabulary)

    def _compiled(self, grammar: Grammar) -> LLMatcher:
        if len(grammar.text) > MAX_TEXT:
            raise _refused(f"at most {MAX_TEXT} characters are accepted, got {len(grammar.text)}", grammar.param)
        with self._lock:
            made = self._known.get(grammar)
            tokenizer = self._tokenizer = self._tokenizer or self._load(grammar)
        if made is None:
            try:
                made = _compile(tokenizer, replace(grammar, param=""))  # it may come again in another field
            except RequestError as error:
                made = RequestError(str(error), param=error.param)  # without the stack of the one that was raised
        with self._lock:
            self._known[grammar] = made
            self._known.move_to_end(grammar)
            while len(self._known) > MAX_KEPT or sum(len(each.text) for each in self._known) > MAX_KEPT_TEXT:
                self._known.popitem(last=False)
        if isinstance(made, RequestError):
            raise RequestError(f"{grammar.param}{made}", param=f"{grammar.param}{made.param}", code="invalid_grammar")
        return made

    def _load(self, grammar: Grammar) -> LLTokenizer:
        if self._read is None:
            raise RequestError("this engine was given no tokenizer, and a grammar needs one", param=grammar.param)
        if not self.eos_ids:
            raise RequestError(
                "this model has no token that ends a text, so that a reply could not end where its grammar does",
                param=grammar.param,
            )
        state = self._read()
        try:
            smallest = LLTokenizer(state, eos_token=list(self.eos_ids), slices=LLTokenizer.json_slices())
            if smallest.vocab_size >= self.vocab_size:
                return smallest
            return LLTokenizer(
                state, n_vocab=self.vocab_size, eos_token=list(self.eos_ids), slices=LLTokenizer.json_slices()
            )
        except Exception as error:  # the library raises several kinds
            raise RequestError(
                f"this model's tokenizer cannot be used with a grammar: {error}", param=grammar.param
            ) from None


def _compile(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """Compile a grammar, and refuse it where a part cannot be enforced. Raises: RequestError."""
    param = grammar.param
    made: list[LLMatcher] = []
    trouble: list[Exception] = []

    def work() -> None:
        try:
            matcher = LLMatcher(tokenizer, _behind(grammar.before, _source(grammar)), log_level=0, limits=LIMITS)
            matcher.compute_bitmask()  # a grammar that no text satisfies fails here
            error = matcher.get_error() if matcher.is_error() else ""
            if error and grammar.kind == "json_schema":
                where, error = find_offending(
                    json.loads(grammar.text), error, lambda part: _error_of(tokenizer, part, grammar.lenient)
                )
                raise _refused(reason_of(error), param + where)
            if error:
                raise _refused(reason_of(error), param)
            made.append(matcher.deep_copy())
        except Exception as error:  # raised by the caller's thread
            trouble.append(error)

    with _deep_stack():
        thread = threading.Thread(target=work, name="afterglow-grammar")
        thread.start()
    thread.join()
    if trouble:
        raise trouble[0]
    return made[0]


def _source(grammar: Grammar) -> str:
    """Write a grammar as llguidance reads it. Raises: RequestError."""
    try:
        if grammar.kind == "json_schema":
            schema = json.loads(grammar.text)
            if isinstance(schema, dict) and "x-guidance" in schema:
                raise _refused("options of the compiler are not accepted", f"{grammar.param}.x-guidance")
            if not isinstance(schema, dict | bool):
                raise _refused(f"a JSON schema is an object, got {grammar.text[:80]}", grammar.param)
            if (where := endless(schema)) is not None:
                raise _refused(ENDLESS, grammar.param + where)
            return _schema_source(schema, grammar.compact, grammar.lenient)
        if grammar.kind == "choice":
            choices = json.loads(grammar.text)
            if not (isinstance(choices, list) and choices and all(isinstance(each, str) and each for each in choices)):
                raise _refused("choices are a list of at least one text, none of them empty", grammar.param)
        return grammar_from(grammar.kind, grammar.text)
    except (ValueError, RecursionError) as error:
        raise _refused(str(error).splitlines()[0], grammar.param) from None


def _behind(before: str, source: str) -> str:
    """Let a text that follows `before` (Lark) stand before what the grammar `source` describes."""
    if not before:
        return source
    parts = json.loads(source)["grammars"] if source.startswith("{") else [{"lark_grammar": source}]
    return json.dumps({"grammars": [{"lark_grammar": before}, {**parts[0], "name": "answer"}, *parts[1:]]})


def _schema_source(schema: object, compact: bool = False, lenient: bool = False) -> str:
    with_options = schema if isinstance(schema, dict) else {"allOf": [schema]}  # true and false cannot hold options
    return LLMatcher.grammar_from_json_schema(
        json.dumps(sharpened(with_options)),
        overrides={
            "lenient": lenient,
            "coerce_one_of": False,
            "whitespace_flexible": not compact,
            "whitespace_pattern": None if compact else WHITE_SPACE,
        },
    )


def _error_of(tokenizer: LLTokenizer, schema: object, lenient: bool) -> str:
    matcher = LLMatcher(tokenizer, _schema_source(schema, lenient=lenient), log_level=0, limits=LIMITS)
    return matcher.get_error() if matcher.is_error() else ""


def _refused(reason: str, param: str) -> RequestError:
    return RequestError(f"{param}: {reason}", param=param, code="invalid_grammar")


@contextlib.contextmanager
def _deep_stack() -> Iterator[None]:
    """Give threads that are started inside a deep stack."""
    with _one_stack:
        before = threading.stack_size(STACK_BYTES)
        try:
            yield
        finally:
            threading.stack_size(before)


MAX_TRIALS = 500  # parts of a schema that are compiled to find the one
SEARCH_SECONDS = 1.0  # how long that may take: other requests wait for the thread

_UNIMPLEMENTED = re.compile(r'Unimplemented keys: \["([^"]+)"')
_PLACE = re.compile(r"^at \d+\(\d+\): failed to compile JSON schema: ")
_VALUE = re.compile(r"(?:Expected .+|Value) for '(\w+)'")
_KEYWORDS = {  # in an error's text: the keyword that it is about
    "regex": "pattern",
    "Unknown format": "format",
    "Invalid type": "type",
    "oneOf constraints": "oneOf",
    "Pointer ": "$ref",
    "Resource ": "$ref",
    "minLength (": "minLength",
    "enum": "enum",
    "patternProperty": "patternProperties",
}


def find_offending(
    schema: object, error: str, error_of: Callable[[object], str], clock: Callable[[], float] = time.monotonic
) -> tuple[str, str]:
    """Find the smallest part of a schema that gives `error`. `error_of` compiles a part, and returns its error or "".

    Returns the part's path, to append to the name of the schema's field, and the error. After `MAX_TRIALS`, or
    `SEARCH_SECONDS` by `clock`, the part is the smallest that was found.
    """
    trials, stop = 0, clock() + SEARCH_SECONDS
    error = _bare(error)

    def search(part: object, path: str) -> str:
        nonlocal trials
        for name, child in parts(part):
            trials += 1
            if trials > MAX_TRIALS or clock() >= stop:
                break
            if _bare(error_of(_alone(child, schema))) == error:
                return search(child, path + name)
        return path + _keyword(part, error)

    return search(schema, ""), error


def reason_of(error: str) -> str:
    """Say in one line why a grammar was refused."""
    found = _UNIMPLEMENTED.search(error)
    if found:
        return f"the keyword {found[1]!r} cannot be enforced"
    lines = [line.strip() for line in error.splitlines() if line.strip()] or ["it cannot be enforced"]
    said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if lines[0].startswith("NoExtension"):
        return "no text satisfies it"
    return (f"invalid regular expression: {said[0]}" if said else lines[0])[:500]


def _bare(error: str) -> str:
    """Return an error without its place in a larger grammar, and the references that led there."""
    return _PLACE.sub("", error.partition("\n  while processing ")[0])


def _alone(part: object, schema: object) -> object:
    """Make a part of a schema a schema of its own: with the definitions that it may refer to."""
    if not isinstance(part, dict) or not isinstance(schema, dict):
        return part
    return {**{name: schema[name] for name in SHARED if name in schema}, **part}


def _keyword(part: object, error: str) -> str:
    found = _UNIMPLEMENTED.search(error) or _VALUE.search(error)
    wanted = [found[1]] if found else [keyword for text, keyword in _KEYWORDS.items() if text in error]
    return next((f".{keyword}" for keyword in wanted if isinstance(part, dict) and keyword in part), "")
