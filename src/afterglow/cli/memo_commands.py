"""The subcommands of `afterglow memo`. Each imports what it needs when it runs."""

from __future__ import annotations

from dataclasses import MISSING
from pathlib import Path
from typing import Annotated

import typer

from afterglow.cli.command_options import MemoTexts
from afterglow.cli.parameters import Only, command
from afterglow.config import EngineConfig, argument, option
from afterglow.memo.options import MemoOptions

memo_app = typer.Typer(
    help="Make, extend and verify databases of attention maps (AttnCache): embed and serve take them with --memo.",
    no_args_is_help=True,
)

Compute = Annotated[EngineConfig, Only(("quantization", "threads"))]
Folder = Annotated[Path, argument(MISSING, "DIR", "The database's folder.")]


@command(memo_app, "build")
def build(
    texts: MemoTexts,
    out: Annotated[
        Path, option(MISSING, "Make the database in this folder; a build that was ended goes on.", metavar="DIR")
    ],
    calibrate: Annotated[
        Path | None,
        option(
            None,
            "Calibrate on these texts, one in a line, of another source than --texts: what a threshold costs is then known for texts "
            "that are unlike the stored ones. The default is some of --texts, which training does not see.",
            metavar="FILE",
        ),
    ],
    options: MemoOptions,
    engine: Compute,
) -> int:
    """Collect the attention maps of texts, train the projector that finds them, and measure their worth on held-out texts.

    Ends with a table: at each threshold the share of texts and of layers that take maps, and the error of the embedding.
    Maps of a model with --quantization int8 are used with that alone, and maps of one without it likewise.
    """
    from afterglow.cli import memo_databases

    return memo_databases.build(texts, out, calibrate, options, engine)


@command(memo_app, "add")
def add(
    folder: Folder,
    texts: MemoTexts,
    max_bytes: Annotated[
        int | None,
        option(
            None,
            "Stop taking maps when they have this size on disk, such as 2G. The default is what the build was given.",
            size=True,
        ),
    ],
    engine: Compute,
) -> int:
    """Add texts to a database without training: the trained projector finds them too, and the database counts them apart."""
    from afterglow.cli import memo_databases

    return memo_databases.add(texts, folder, max_bytes, engine)


@command(memo_app, "check")
def check(
    folder: Folder,
    json: Annotated[bool, option(False, "Print JSON for programs instead of lines.", names=("--json",))],
) -> int:
    """Verify every stored byte; exit code 1 if something is damaged. Damaged texts are computed, as if not stored."""
    from afterglow.cli import memo_databases

    return memo_databases.check(folder, json)
