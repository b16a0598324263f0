"""Tables on a terminal and in a pipe."""

from __future__ import annotations

import pytest

from afterglow.cli.terminal_tables import lines, nested, table


def test_in_a_pipe_no_cell_is_wrapped_cut_or_taken_for_markup(capsys: pytest.CaptureFixture[str]) -> None:
    long = "x" * 300
    table(("name", "tokens"), [("[red]a[/red] :smile:", "1"), (long, "22")], numbers=True)
    head, first, second = capsys.readouterr().out.splitlines()
    assert head == "name".ljust(300) + "  tokens"
    assert first == "[red]a[/red] :smile:".ljust(300) + "       1"
    assert second == f"{long}      22"
    table(("name", "pinned"), [("a", "yes"), ("b", "-")])
    assert capsys.readouterr().out == "name  pinned\na     yes\nb     -\n"


def test_on_a_terminal_all_of_a_cell_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    words = " ".join(f"word{n}" for n in range(30))
    lines([("  by tier", words), ("cost", "y" * 100)])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 40
    assert out.split()[2:32] == words.split()
    assert out.count("y") == 101


def test_nested_figures_are_lines() -> None:
    facts = {"object": "stats", "a_b": 1, "inner": {"c": "x", "none": None}}
    assert nested(facts, "  ") == [("  a b", "1"), ("  inner", ""), ("    c", "x")]
