"""Outputs on their way to the other process: of most only the tokens are new, which take a thirtieth of the time to pickle."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from afterglow.request import FinishReason, Output


class NewTokens(NamedTuple):
    """Holds the new tokens of a request, where all else of its output is as before."""

    request_id: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None


class OutputWriter:
    """Sends the outputs of one request. Call it as the sink of `Engine.submit`."""

    def __init__(self, send: Callable[[Output | NewTokens], None]) -> None:
        self._send = send
        self._known: tuple[object, ...] | None = None  # as sent

    def __call__(self, output: Output) -> None:
        """Send an output, or what is new in it."""
        known = (output.cached, output.missed, output.waited)
        more = output.logprobs or output.prompt_logprobs or output.truncation or output.selected or output.error
        if known == self._known and not more:
            self._send(NewTokens(output.request_id, output.tokens, output.finish_reason))
        else:
            self._known = known
            self._send(output)


class OutputReader:
    """Makes whole outputs of what writers send, for all requests."""

    def __init__(self) -> None:
        self._last: dict[str, Output] = {}  # whole ones, by request id

    def whole(self, message: Output | NewTokens) -> Output:
        """Return the output that was written."""
        if isinstance(message, NewTokens):
            last = self._last[message.request_id]
            output = Output(*message, cached=last.cached, missed=last.missed, waited=last.waited)
        else:
            output = self._last[message.request_id] = message
        if output.finish_reason is not None:
            del self._last[output.request_id]
        return output
