"""Filler text: sentences from the docstrings of the Python standard library that runs the program."""

from __future__ import annotations

import ast
import hashlib
import re
import sysconfig
from pathlib import Path


def filler_sentences() -> tuple[list[str], list[str]]:
    """Collect sentences from standard library docstrings: (for training, held out)."""
    root = Path(sysconfig.get_paths()["stdlib"])
    seen: set[str] = set()
    for path in sorted(root.glob("*.py")) + sorted(root.glob("*/*.py")):
        if {"test", "tests", "site-packages", "idlelib", "lib2to3"} & set(path.parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        for node in ast.walk(tree):
            if not isinstance(node, kinds):
                continue
            for block in re.split(r"\n\s*\n", ast.get_docstring(node) or ""):
                text = " ".join(block.split())
                for sentence in re.split(r"(?<=[.!?]) (?=[A-Z])", text):
                    if (
                        30 <= len(sentence) <= 200
                        and sentence.endswith(".")
                        and sentence[0].isupper()
                        and sentence.isascii()
                        and not re.search(r">>>|\.\.\.|[<>{}|\\=@#*~^\[\]_/]|\d{3}| {2}", sentence)
                    ):
                        seen.add(sentence)
    train: list[str] = []
    held: list[str] = []
    for sentence in sorted(seen):
        bucket = hashlib.sha256(sentence.encode()).digest()[0] % 12
        (held if bucket == 0 else train).append(sentence)
    return train, held
