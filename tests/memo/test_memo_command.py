"""`afterglow memo` as a user runs it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer import BadParameter

from afterglow.cli import commands
from afterglow.errors import UserError
from afterglow.memo.maps import HEADER_BYTES, MAPS
from afterglow.model.linear import int8_levels
from tests.memo.tiny import WORDS, tiny_encoder


def run(*args: object) -> int:
    code = commands.app(list(map(str, args)), prog_name="afterglow", standalone_mode=False)
    return code if isinstance(code, int) else 0


@pytest.fixture
def made(tmp_path: Path) -> tuple[Path, Path, Path]:
    model = tiny_encoder(tmp_path / "model")
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(f"the {a} sat on the {b}" for a in WORDS for b in WORDS[:1]) + "\n\n")
    return model, texts, tmp_path / "maps"


def test_build_add_check_and_use(made: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    model, texts, out = made
    assert run("memo", "build", model, "--texts", texts, "--out", out, "--steps", 5, "--threads", 1) == 0
    said = capsys.readouterr().out
    assert "20 texts" in said
    assert "on held-out texts:" in said
    assert "0.990" in said
    assert "Under 1.15 times as fast, --memo-mode auto leaves maps alone" in said
    assert run("memo", "check", out) == 0
    said = capsys.readouterr().out
    assert "all is sound" in said
    assert re.search(r"\d\.\d\d times as fast with them: --memo-mode auto (used them|left them alone)", said)

    more = texts.with_name("more.txt")
    more.write_text("a red kite is near the river\nthe cat sat on the the\n")
    assert run("memo", "add", out, model, "--texts", more, "--threads", 1) == 0
    assert "1 texts added" in capsys.readouterr().out
    assert run("memo", "check", out, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["records"], facts["added_after_training"]) == (21, 1)

    asked = ("embed", "--model", model, "--memo", out, "--threshold", "0.5", "--threads", 1)
    for mode, hit in (("on", True), ("off", False)):
        assert run(*asked, "--memo-mode", mode, "the cat sat on the the") == 0
        assert json.loads(capsys.readouterr().out)["memo_hit"] is hit
    with pytest.raises(BadParameter, match="'sometimes' is not one of"):
        run(*asked, "--memo-mode", "sometimes", "the cat")

    with (out / MAPS).open("r+b") as file:
        file.seek(HEADER_BYTES + 9)
        file.write(b"\xff\xff")
    assert run("memo", "check", out) == 1
    assert "record 0 is damaged" in capsys.readouterr().out


def test_a_build_is_calibrated_on_another_file(
    made: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model, texts, out = made
    others = texts.with_name("others.txt")
    others.write_text("a red kite is near the river\nthe old mill ran on rain\n\n")
    words = ("memo", "build", model, "--texts", texts, "--out", out, "--steps", 5, "--threads", 1)
    assert run(*words, "--calibrate", others) == 0
    said = capsys.readouterr().out
    assert "on 2 texts of another source:" in said
    assert "20 texts, " in said


@pytest.mark.skipif(not int8_levels(), reason="no int8 here")
def test_maps_of_other_weights_are_refused(made: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    model, texts, out = made
    asked = (
        "embed",
        "--model",
        model,
        "--memo",
        out,
        "--threshold",
        "0.5",
        "--memo-mode",
        "on",
        "--threads",
        1,
        "the cat",
    )
    made_with = ("--steps", 5, "--threads", 1)
    assert run("memo", "build", model, "--texts", texts, "--out", out, "--quantization", "int8", *made_with) == 0
    capsys.readouterr()
    assert run("memo", "check", out, "--json") == 0
    assert json.loads(capsys.readouterr().out)["quantisation"] == "int8"
    assert run(*asked, "--quantization", "int8") == 0
    with pytest.raises(UserError, match="of quantisation 'int8', and this is quantisation 'float32'"):
        run(*asked)
    with pytest.raises(UserError, match="of quantisation 'int8', and this is quantisation 'float32'"):
        run("memo", "add", out, model, "--texts", texts, "--threads", 1)


def test_mistakes_are_one_line(made: tuple[Path, Path, Path]) -> None:
    model, texts, out = made
    for args, message in (
        (("build", model, "--texts", out / "none.txt", "--out", out), "cannot read --texts"),
        (("build", model, "--texts", texts, "--out", out, "--calibrate", out / "none.txt"), "cannot read --calibrate"),
        (
            ("build", model, "--texts", texts, "--out", out, "--calibrate", texts),
            "texts to calibrate on are too long, or among",
        ),
        (("build", model, "--texts", texts, "--out", out, "--projector", "cnn"), "'cnn' is not one of"),
        (("build", model, "--texts", texts, "--out", out, "--max-bytes", "lots"), "is not a size"),
        (("build", model, "--texts", texts, "--out", out, "--held-out", 0), "--held-out must be at least 1"),
        (("build", model, "--texts", texts, "--out", out, "--max-bytes", "4200"), "2 sentences at least"),
        (("check", out / "none"), "afterglow memo build makes one"),
        (("add", out / "none", model, "--texts", texts), "afterglow memo build makes one"),
    ):
        with pytest.raises((UserError, BadParameter), match=message):
            run("memo", *args)
