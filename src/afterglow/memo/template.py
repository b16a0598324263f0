"""The prompt under which a decoder says in one state what a text means (AttnCache §5.1)."""

from __future__ import annotations

from dataclasses import dataclass

from afterglow.errors import ConfigError

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
