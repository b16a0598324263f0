"""A model that embeds texts: an embedder with its tokenizer, the prompt around each text, and a name."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from afterglow.choices import DtypeName, QuantizationName
from afterglow.errors import AfterglowError, ConfigError, RequestError, UserError
from afterglow.memo.break_even import LEAST_GAIN, Gain, measure
from afterglow.memo.database import MemoDatabase, memo_digest
from afterglow.memo.map_attention import AttentionMemo
from afterglow.memo.options import DEFAULT_THRESHOLD, MemoMode, check_memo_mode
from afterglow.memo.pooling import Pooling
from afterglow.memo.sequence_embedder import Embedder, EmbedResult
from afterglow.model.checkpoint import Progress
from afterglow.model.decoder import Decoder
from afterglow.model.encoder import Model
from afterglow.model.loader import is_encoder, load_encoder, load_model
from afterglow.text import Tokenizer

PLACE = "{text}"
ONE_WORD = f'This sentence: "{PLACE}" means in one word:'


@dataclass(frozen=True, slots=True)
class Template:
    """A prompt with one place for the text. Other braces are text. Raises: ConfigError where `{text}` is not there
    exactly once."""

    source: str = ONE_WORD

    def __post_init__(self) -> None:
        count = self.source.count(PLACE)
        if count != 1:
            shown = self.source if len(self.source) <= 80 else f"{self.source[:80]}..."
            raise ConfigError(
                f"an embedding template needs {PLACE} exactly once, and {shown!r} has it {count} times; such as {ONE_WORD!r}"
            )

    def fill(self, text: str) -> str:
        """The prompt for `text`, which may itself contain anything."""
        before, after = self.source.split(PLACE)
        return f"{before}{text}{after}"


BARE = Template(PLACE)
"""The text alone, as encoders read it."""


log = logging.getLogger("afterglow.memo")


@dataclass(frozen=True, slots=True)
class MemoUse:
    """A database of attention maps, and whether it is used. `gain`: what `auto` measured."""

    database: MemoDatabase
    mode: MemoMode
    used: bool
    gain: Gain | None = None

    @property
    def damaged(self) -> int:
        """Count maps that were found damaged."""
        return self.database.stats["damaged"]


@dataclass(frozen=True, slots=True)
class TextEmbedder:
    """Texts to vectors. `tokens` and `embed` may be called from any thread."""

    name: str
    embedder: Embedder
    tokenizer: Tokenizer
    template: Template
    memo: MemoUse | None = None
    """What became of the attention maps that it was given."""

    def tokens(self, text: str, truncate: int | None = None, field: str = "truncate_prompt_tokens") -> list[int]:
        """The ids of `text` in its prompt, special tokens included. Where they are more than `truncate`, the end of the
        text is left out; the rest of the template stays. Raises: RequestError, about `field`, where that leaves no room for any."""
        ids = self.tokenizer.encode(self.template.fill(text))
        if truncate is None or len(ids) <= truncate:
            return ids
        bare = self.tokenizer.encode(self.template.fill(""))
        if truncate <= len(bare):
            raise RequestError(
                f"{field}: {truncate} tokens leave no room for a text, since {len(bare)} tokens are the "
                f"prompt around it; use {len(bare) + 1} or more",
                param=field,
            )
        if self.template.fill("") == "":  # only special tokens follow the text, as transformers cuts it
            after = 0
            while after < len(bare) and ids[-1 - after] == bare[-1 - after]:
                after += 1
            return ids[: truncate - after] + ids[len(ids) - after :]

        # What the text's last characters become depends on what follows: the prompt is tokenised with a shorter text.
        def prompt(size: int) -> list[int]:
            return self.tokenizer.encode(self.template.fill(text[:size]))

        return prompt(bisect_right(range(len(text) + 1), truncate, key=lambda size: len(prompt(size))) - 1)

    def embed(self, texts: Sequence[str], truncate: int | None = None) -> EmbedResult:
        """One vector for each text, in order. Raises: RequestError."""
        sequences = [self.tokens(text, truncate, "truncate") for text in texts]
        for index, ids in enumerate(sequences):
            self.embedder.check(ids, f"texts[{index}]", "texts")
        return self.embedder.embed(sequences)


def text_embedder(
    model: Model,
    folder: Path,
    tokenizer: Tokenizer,
    name: str,
    *,
    template: str | None = None,
    memo: Path | None = None,
    threshold: float = DEFAULT_THRESHOLD,
    memo_mode: MemoMode = "on",
    max_tokens: int | None = None,
) -> TextEmbedder:
    """A loaded model as an embedder. `template`: the prompt around each text; default: none for models that were made
    to embed, and `ONE_WORD` for other decoders (AttnCache §5.1). `memo`: a database of its attention maps, used for
    texts that are at least `threshold` alike. `memo_mode`: "auto" measures first whether that is faster here, and leaves
    it alone where it is not (see `break_even.measure`); "off" only looks whether the maps are this model's.

    Raises: ConfigError for a template without `{text}`, for another model's maps and for a mode that is none, ModelError
    for pooling that is not supported.
    """
    pooling = Pooling.read(folder, causal=model.spec.causal)
    chosen = BARE if pooling.declared or not model.spec.causal else Template()
    if template is not None:
        chosen = Template(template)
    check_memo_mode(memo_mode)
    opened = None if memo is None else open_memo(memo, threshold, model, folder, chosen)
    calibrated = opened.database.settings.pooling if opened is not None else ""
    if calibrated not in ("", pooling.mode):
        raise ConfigError(
            f"{memo} was calibrated for embeddings by {calibrated!r} pooling, and this model's are by {pooling.mode!r}; build a database for it "
            "(afterglow memo build)"
        )
    embedder = Embedder(model, pooling, max_tokens=max_tokens)
    overhead = len(tokenizer.encode(chosen.fill("")))
    if overhead >= embedder.max_tokens:
        raise ConfigError(
            f"the embedding template takes {overhead} tokens and the model {embedder.max_tokens}: no text fits; "
            "use a shorter template"
        )
    if opened is None:
        return TextEmbedder(name, embedder, tokenizer, chosen)
    gain = measure(embedder, opened.database, threshold) if memo_mode == "auto" else None
    used = memo_mode == "on" or (gain is not None and gain.pays)
    if gain is not None:
        tell = log.info if used else log.warning
        tell("%s: %s", memo, verdict(gain))
    if used:
        embedder = Embedder(model, pooling, memo=opened, max_tokens=max_tokens)
    return TextEmbedder(name, embedder, tokenizer, chosen, MemoUse(opened.database, memo_mode, used, gain))


def verdict(gain: Gain) -> str:
    """What `auto` found, in words."""
    return (
        f"at threshold {gain.threshold:g} {gain.hit_rate:.0%} of texts are expected to take maps, in {gain.layer_rate:.0%} of "
        f"all layers; embedding is {gain.speedup:.2f} times as fast with them, so they are "
        + ("used" if gain.pays else f"left alone: less than {LEAST_GAIN:g} (--memo-mode on uses them anyway)")
    )


def memo_identity(model: Model, folder: Path, template: Template) -> dict[str, str]:
    """What attention maps of this model under this prompt are filed under: see `MemoDatabase.open`. Weights in 8 bits
    make other maps than those they were rounded from. Raises: ConfigError for attention that is not of all rows by the plain formula."""
    if not model.spec.plain_scores:
        raise ConfigError(
            f"a memo has no maps of a model of type {model.spec.family}, whose attention has windows, sinks or soft-capped scores; "
            "leave it out"
        )
    dtype = str(model.dtype).removeprefix("torch.")
    kept = dtype if model.quantization == "none" else model.quantization
    return {
        "model_digest": memo_digest(folder, dtype, model.quantization),
        "quantisation": kept,
        "template": template.source,
    }


def open_memo(memo: Path, threshold: float, model: Model, folder: Path, template: Template) -> AttentionMemo:
    """The attention maps in `memo`, if they are this model's under this prompt. Raises: ConfigError otherwise."""
    try:
        database = MemoDatabase.open(memo, **memo_identity(model, folder, template))
        database.check(model.spec)
    except UserError:
        raise
    except AfterglowError as error:  # damaged as a whole: the user asked for it, and should know
        raise ConfigError(str(error)) from None
    for note in database.notes:
        log.warning("%s", note)
    return AttentionMemo(database, threshold)


def load_embedding_model(
    folder: Path,
    *,
    dtype: DtypeName = "auto",
    device: str = "cpu",
    quantization: QuantizationName = "auto",
    progress: Progress | None = None,
) -> Model:
    """The encoder or the decoder of a model directory. Raises: ModelError; ConfigError where it cannot be quantised so."""
    if is_encoder(folder):
        return load_encoder(folder, dtype=dtype, device=device, quantization=quantization, progress=progress)
    model: Decoder = load_model(folder, dtype=dtype, device=device, quantization=quantization, progress=progress)
    return model
