"""Code blocks of Markdown files, and the expectations in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    path
    for folder, pattern in ((ROOT, "*.md"), (ROOT / "docs", "*.md"), (ROOT / "src/afterglow/assets", "**/*.md"))
    for path in folder.glob(pattern)
)
_FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class CodeBlock:
    """One fenced block. `line`: the number of its first line of code."""

    path: Path
    line: int
    language: str
    code: str

    @property
    def name(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"

    @property
    def printed(self) -> list[str]:
        """The lines that comments of the form `# -> TEXT` promise."""
        return re.findall(r"^# -> (.*)$", self.code, re.MULTILINE)


def code_blocks(*languages: str) -> list[CodeBlock]:
    """Find the blocks of all documents in some languages; `""` are blocks that name none."""
    return [
        CodeBlock(path, text.count("\n", 0, found.start("code")) + 1, found["language"], found["code"])
        for path in DOCUMENTS
        for text in [path.read_text("utf-8")]
        for found in _FENCE.finditer(text)
        if found["language"] in languages
    ]
