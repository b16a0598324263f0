"""How long a reply may be, and how many replies a request may have."""

from __future__ import annotations

from afterglow.errors import RequestError
from afterglow.request import ContextWindow
from afterglow.server.bodies.reply_bodies import Body


class ReplyLengths:
    """Lengths of replies on one server, from a request's own limit, the model's defaults and the context window."""

    def __init__(self, window: ContextWindow, default: int | None, max_queue: int) -> None:
        """`default`: tokens of a reply where the request gives no limit (`max_new_tokens` of the model's author)."""
        self.window = window
        self._default = default
        self._max_queue = max_queue

    def check_count(self, count: int, param: str) -> None:
        """Refuse more replies than the queue can hold: a later try would not help. Raises: RequestError."""
        if count > self._max_queue:
            raise RequestError(
                f"{count} replies were asked for at once, and this server's queue holds {self._max_queue} (--max-queue); "
                "ask for them in several requests",
                param=param,
            )

    def longest_prompt(self, body: Body) -> int:
        """Count the tokens up to which a prompt is not truncated; see `ContextWindow.longest`."""
        return self.window.longest(self._wanted(body))

    def max_tokens(self, body: Body, rows: int, cut: bool = False) -> int:
        """Count the tokens that may be generated after a prompt of `rows` tokens. `cut`: the engine may truncate the prompt.

        Raises: RequestError, if prompt and reply do not fit the context.
        """
        window, asked = self.window, body.reply_tokens
        if rows == 0:
            raise RequestError("the prompt is empty", param=body.prompt_field)
        if cut:
            if asked is not None and asked >= window.limit and not body.clamped:
                raise window.error(f"{asked} were asked for the reply alone", body.tokens_field)
            wanted = self._wanted(body)  # a truncated prompt's length is known later: the engine ends the reply
            return min(wanted, window.room(rows if window.fits(rows, wanted) else 1))
        window.refuse(rows, 1 if asked is None else asked, param=body.prompt_field)
        if asked is not None and asked > window.room(rows) and not body.clamped:
            raise window.error(
                f"{rows + asked} were asked for: {rows} in the prompt and {asked} for the reply", body.tokens_field
            )
        return min(self._wanted(body), window.room(rows))

    def _wanted(self, body: Body) -> int:
        if body.reply_tokens is not None:
            return body.reply_tokens
        found = [n for n in (body.default_tokens, self._default) if n is not None]
        return min(found, default=self.window.limit)
