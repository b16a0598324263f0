"""The subcommands of `afterglow memo`. Each imports what it needs when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from afterglow.cli.command_options import JsonOutput, MemoFolder, MemoLimit, MemoTexts, NewMemo
from afterglow.cli.parameters import Only, command
from afterglow.config import EngineConfig
from afterglow.memo.options import MemoOptions

memo_app = typer.Typer(
    help="Make, extend and verify databases of attention maps (AttnCache): embed and serve take them with --memo.",
    no_args_is_help=True,
)

Compute = Annotated[EngineConfig, Only(("quantization", "threads"))]


@command(memo_app, "build")
def build(texts: MemoTexts, new: NewMemo, options: MemoOptions, engine: Compute) -> int:
    """Collect the attention maps of texts, train the projector that finds them, and measure their worth on held-out texts.

    Ends with a table: at each threshold the share of texts and of layers that take maps, and the error of the embedding.
    Maps of a model with --quantization int8 are used with that alone, and maps of one without it likewise.
    """
    from afterglow.cli import memo_databases

    return memo_databases.build(texts, new.out, options, engine)


@command(memo_app, "add")
def add(folder: MemoFolder, texts: MemoTexts, limit: MemoLimit, engine: Compute) -> int:
    """Add texts to a database without training: the trained projector finds them too, and the database counts them apart."""
    from afterglow.cli import memo_databases

    return memo_databases.add(texts, folder.folder, limit.max_bytes, engine)


@command(memo_app, "check")
def check(folder: MemoFolder, output: JsonOutput) -> int:
    """Verify every stored byte; exit code 1 if something is damaged. Damaged texts are computed, as if not stored."""
    from afterglow.cli import memo_databases

    return memo_databases.check(folder.folder, output.as_json)
