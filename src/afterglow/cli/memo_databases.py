"""`afterglow memo`: making, extending and verifying databases of attention maps."""

from __future__ import annotations

import dataclasses
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from afterglow.cli import simulation_report as fig
from afterglow.cli.command_options import MemoTexts
from afterglow.cli.terminal import full_lines, progress, read_file
from afterglow.cli.terminal_tables import print_json, table
from afterglow.config import EngineConfig, format_size
from afterglow.errors import AfterglowError, ConfigError
from afterglow.library.embedder import load_embedder
from afterglow.library.locate import find_embedding_model

if TYPE_CHECKING:
    from afterglow.memo.build import Builder
    from afterglow.memo.database import MemoDatabase
    from afterglow.memo.memo_settings import MemoSettings
    from afterglow.memo.options import MemoOptions
    from afterglow.memo.texts import TextEmbedder

CURVE = "thresholds.svg"


def build(texts: MemoTexts, out: Path, calibrate: Path | None, options: MemoOptions, config: EngineConfig) -> int:
    """Build a database in the folder `out`, and return the exit code. Raises: AfterglowError."""
    given, others = _lines(texts.texts), [] if calibrate is None else _lines(calibrate, "--calibrate")
    embedder, folder = _embedder(texts, config)
    with progress() as report:
        from afterglow.memo.break_even import measure_curve

        builder = _builder(embedder, folder, out, options, report)
        try:
            database = builder.run(*([embedder.tokens(text) for text in each] for each in (given, others)))
        except KeyboardInterrupt:
            print(
                f"afterglow: ended; the maps collected so far are in {out}: the same command goes on from there",
                file=sys.stderr,
            )
            raise
        measure_curve(embedder.embedder, database, report)
    _tell(builder, database)
    _table(database)
    _draw(database)
    for note in database.notes:
        print(f"afterglow: {note}", file=sys.stderr)
    return 0


def add(texts: MemoTexts, folder: Path, max_bytes: int | None, config: EngineConfig) -> int:
    """Add texts to the database in a folder, and return the exit code. Raises: AfterglowError."""
    from afterglow.memo.memo_settings import MemoSettings

    given = _lines(texts.texts)
    options = MemoSettings.load(folder).options
    embedder, where = _embedder(texts, config)
    with progress() as report:
        builder = _builder(embedder, where, folder, options, report)
        new = builder.add([embedder.tokens(text) for text in given], max_bytes)
    print(f"{new} texts added to {folder}, without training")
    if builder.skipped:
        print(f"{builder.skipped} left out: too long, or no room under --max-bytes")
    return 0


def check(folder: Path, as_json: bool) -> int:
    """Verify every record, the vectors and the projector; return 1 if anything is damaged. Raises: ConfigError."""
    from afterglow.memo.break_even import LEAST_GAIN
    from afterglow.memo.database import PROJECTOR, read_vectors
    from afterglow.memo.maps import MapStore
    from afterglow.memo.memo_settings import MemoSettings
    from afterglow.memo.projector import Projector

    settings, store = MemoSettings.load(folder), MapStore.open(folder)
    wrong: list[str] = []
    try:
        Projector.load(folder / PROJECTOR)
        read_vectors(folder, settings.records, settings.vectors_crc)
    except AfterglowError as error:
        wrong.append(str(error))
    damaged = []
    with progress() as report:
        for number in range(settings.records):
            try:
                store.read(number)
            except (AfterglowError, IndexError) as error:
                damaged.append(number)
                wrong.append(str(error) if isinstance(error, AfterglowError) else f"record {number} is missing")
            report("checking", number + 1, settings.records)
    facts = {
        "records": settings.records,
        "added_after_training": settings.records - settings.trained_on,
        "bytes": store.nbytes,
        "damaged_records": damaged,
        "problems": wrong,
        "calibrated_on_other_texts": settings.calibrated_on,
        "curve": settings.curve,
        **dataclasses.asdict(store.identity),
    }
    if as_json:
        print_json(facts)
    else:
        for line in wrong:
            print(line)
        later = f", {facts['added_after_training']} added after training" if facts["added_after_training"] else ""
        print(
            f"{folder}: {settings.records} texts{later}, {format_size(store.nbytes)} of maps; "
            + (f"{len(wrong)} problems" if wrong else "all is sound")
        )
        if "speedup" in (row := _default_row(settings)):
            print(
                f"at threshold {row['threshold']:g} {fig.percent(row['hit_rate'])} of {_calibrated(settings)} took maps; where it was "
                f"built, embedding was {row['speedup']:.2f} times as fast with them: --memo-mode auto "
                + ("used them" if row["speedup"] >= LEAST_GAIN else "left them alone")
            )
    return 1 if wrong else 0


def _embedder(texts: MemoTexts, config: EngineConfig) -> tuple[TextEmbedder, Path]:
    folder, name = find_embedding_model(texts.model)
    with progress() as report:
        return load_embedder(folder, config, name=name, template=texts.template, progress=report), folder


def _default_row(settings: MemoSettings) -> dict[str, float]:
    """Return the row of the curve for the default threshold, or an empty one."""
    from afterglow.memo.options import DEFAULT_THRESHOLD

    return next((row for row in settings.curve if row["threshold"] == DEFAULT_THRESHOLD), {})


def _builder(embedder: TextEmbedder, model: Path, folder: Path, options: MemoOptions, report: Any) -> Builder:
    from afterglow.memo.build import Builder
    from afterglow.memo.texts import memo_identity

    about = memo_identity(embedder.embedder.model, model, embedder.template)
    return Builder(embedder.embedder, folder, options, report=report, **about)


def _lines(path: Path, name: str = "--texts") -> list[str]:
    found = full_lines(read_file(path, f"{name} {path}"))
    if not found:
        raise ConfigError(f"{name} {path} has no texts; write one in a line")
    return found


def _tell(builder: Builder, database: MemoDatabase) -> None:
    options, store = database.settings.options, database.store
    print(f"{len(store)} texts, {format_size(store.nbytes)} of attention maps in {database.folder}")
    if builder.skipped:
        print(f"{builder.skipped} texts were left out: too long, or no room under --max-bytes")
    print(f"projector {options.projector}, maps of {options.neighbours} neighbours, accepted by {options.accept}")


def _table(database: MemoDatabase) -> None:
    from afterglow.memo.break_even import LEAST_GAIN

    print(f"\non {_calibrated(database.settings)}:")
    rows = [
        (
            f"{row['threshold']:.3f}",
            fig.percent(row["hit_rate"]),
            fig.percent(row["layer_rate"]),
            f"{row['error']:.4f}",
            f"{row['variation']:.3f}",
            f"{row['speedup']:.2f}" if "speedup" in row else "",
        )
        for row in database.settings.curve
    ]
    table(("threshold", "texts", "layers", "1 - cosine", "map distance", "times as fast"), rows, numbers=True)
    print("texts: that take maps. layers: of all texts' layers, those that do.")
    print(f"Under {LEAST_GAIN:g} times as fast, --memo-mode auto leaves maps alone; it measures anew where it is used.")


def _calibrated(settings: MemoSettings) -> str:
    return f"{settings.calibrated_on} texts of another source" if settings.calibrated_on else "held-out texts"


def _draw(database: MemoDatabase) -> None:
    """Draw Figure 5 of the paper, if matplotlib is installed."""
    try:
        figures = import_module("matplotlib.figure")
    except ImportError:
        return
    curve = database.settings.curve
    figure = figures.Figure(figsize=(6.0, 3.6), layout="constrained")
    axes = figure.subplots()
    at = [row["threshold"] for row in curve]
    for key, name in (
        ("hit_rate", "texts that take maps"),
        ("layer_rate", "layers that take maps"),
        ("error", "1 - cosine"),
    ):
        axes.plot(at, [row[key] for row in curve], label=name)
    axes.set_xlabel("threshold")
    axes.invert_xaxis()
    axes.legend()
    path = database.folder / CURVE
    figure.savefig(path)
    print(f"\ndrawn: {path}")
