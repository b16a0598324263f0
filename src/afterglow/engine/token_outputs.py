"""Turn the last layer's hidden rows into tokens and log-probabilities."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice

from torch import Tensor

from afterglow.engine.gather import BatchEntry
from afterglow.engine.grammars.masks import Constraint, Drawn, Masks
from afterglow.engine.sampling import Meanwhile, Sampler, logprobs_of, sample
from afterglow.engine.speculation.guesser import Guesser, Guesses
from afterglow.errors import RequestError
from afterglow.kernels.sending import on_device
from afterglow.model.decoder import Decoder
from afterglow.plan.step import Run, StepResult
from afterglow.request import Request, Selected, TokenLogprob, stop_tokens

NO_NUMBERS = "the model's logits are not numbers (NaN): are its weights damaged, or do they overflow in this --dtype?"
LOGIT_ROWS = 256  # rows of logits at a time for prompt log-probabilities, so that a long prompt needs little memory


@dataclass(slots=True)
class RunOutput:
    """Hold a step's result for the plan, and what only the callers need, by job."""

    result: StepResult
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)  # of each token that was drawn
    prompt_logprobs: dict[int, tuple[int, list[TokenLogprob]]] = field(default_factory=dict)  # with their first row
    selected: dict[int, Selected] = field(default_factory=dict)
    guesses: Guesses = field(default_factory=dict)  # of what comes next
    broken: dict[int, RequestError] = field(
        default_factory=dict
    )  # jobs that cannot go on, and why: their tokens are void

    def add(self, other: RunOutput) -> None:
        """Add the outputs of other runs of the same step."""
        self.result.tokens.update(other.result.tokens)
        self.result.failed.update(other.result.failed)
        self.result.accepted.update(other.result.accepted)
        self.result.selecting.update(other.result.selecting)
        self.logprobs.update(other.logprobs)
        self.prompt_logprobs.update(other.prompt_logprobs)
        self.selected.update(other.selected)
        self.guesses.update(other.guesses)
        self.broken.update(other.broken)


class TokenOutputs:
    """Draw tokens as each request asks for."""

    def __init__(self, decoder: Decoder, guesser: Guesser | None = None) -> None:
        self._decoder = decoder
        self._guesser = guesser
        self._eos = frozenset(decoder.spec.eos_ids)
        self._requests: dict[int, tuple[Request, Sampler]] = {}
        self._constraints: dict[int, Constraint] = {}
        self._masks = Masks()

    def register(self, job: int, request: Request, constraint: Constraint | None) -> None:
        """Prepare the sampler of a request, and the first mask of its grammar."""
        sampling = request.sampling
        stops = stop_tokens(sampling, self._eos)
        forbidden = stops if constraint is None else ()  # masks have these
        self._requests[job] = request, Sampler.of(sampling, self._decoder.device, request.prompt, forbidden)
        if self._guesser is not None:
            self._guesser.begin(job, request.prompt, stops)
        if constraint is not None:
            self._constraints[job] = constraint
            self._masks.begin(constraint)

    def shorten(self, job: int, prompt: bytes) -> None:
        """Note that a prompt was cut to these tokens."""
        shaping = self._requests[job][1].shaping
        if shaping is not None:
            shaping.shorten(memoryview(prompt).cast("I"))

    def request(self, job: int) -> Request:
        """Return the request of a job."""
        return self._requests[job][0]

    def forget(self, job: int) -> None:
        """Forget a request, if it was registered."""
        if self._requests.pop(job, None) is None:
            return
        if self._guesser is not None:
            self._guesser.forget(job)
        self._constraints.pop(job, None)

    def logit_rows(self, runs: Sequence[Run], entries: Sequence[BatchEntry], rows: int) -> list[int] | None:
        """List the rows of the batch that need logits; None: all `rows` rows do."""
        if any(self._requests[run.job][0].sampling.prompt_logprobs is not None for run in runs):
            return None
        found = [row for run, entry in zip(runs, entries, strict=True) if run.sample for row in _drawn_rows(run, entry)]
        return None if len(found) == rows else found

    def draw(
        self,
        runs: Sequence[Run],
        entries: Sequence[BatchEntry],
        hidden: Tensor,
        logit_rows: list[int] | None,
        *,
        failed: dict[int, str],
        left: Container[int] = (),
        meanwhile: Meanwhile | None = None,
    ) -> RunOutput:
        """Draw a token for each run that asks for one, and one from the row of each guess that was right.

        `hidden`: the rows `logit_rows` of the batch. `failed`: jobs whose rows are void, and the extents that failed them.
        `left`: jobs that have left the pass. `meanwhile`: goes on from the tokens of runs that decode on.
        Where it raises, nothing has been drawn: the same tokens are drawn when it is called again.
        """
        drawing = [i for i, run in enumerate(runs) if run.sample and run.job not in failed and run.job not in left]
        out = RunOutput(StepResult({}, failed))
        for run, entry in zip(runs, entries, strict=True):
            request, _ = self._requests[run.job]
            top = request.sampling.prompt_logprobs
            if top is not None and run.start < len(request.prompt) and run.job not in failed:
                out.prompt_logprobs[run.job] = (run.start, self._prompt_logprobs(request, entry, hidden, top))
        if not drawing:
            return out
        samplers = [self._requests[runs[i].job][1] for i in drawing]
        before = [sampler.state for sampler in samplers]
        try:
            self._draw([runs[i] for i in drawing], [entries[i] for i in drawing], hidden, logit_rows, out, meanwhile)
        except BaseException:
            for sampler, state in zip(samplers, before, strict=True):
                sampler.go_back(state)
            raise
        return out

    def _draw(
        self,
        runs: Sequence[Run],
        entries: Sequence[BatchEntry],
        hidden: Tensor,
        logit_rows: list[int] | None,
        out: RunOutput,
        meanwhile: Meanwhile | None,
    ) -> None:
        wanted = [_drawn_rows(run, entry) for run, entry in zip(runs, entries, strict=True)]
        every = [row for rows in wanted for row in rows]
        places = every if logit_rows is None else [logit_rows.index(row) for row in every]
        logits = self._decoder.logits(
            hidden if len(places) == len(hidden) else hidden[on_device(places, hidden.device)]
        )
        firsts = [0, *accumulate(len(rows) for rows in wanted)]
        drawn = self._verified(runs, logits, firsts, meanwhile)
        # On a device this would be a launch and a wait in each step.
        if logits.device.type == "cpu":
            no_numbers = logits[firsts[:-1], [tokens[0] for tokens in drawn]].isnan().tolist()
            out.broken.update(
                (run.job, RequestError(NO_NUMBERS, status=500)) for run, no in zip(runs, no_numbers, strict=True) if no
            )
        of_rows: list[int] = []
        for run, tokens, first in zip(runs, drawn, firsts, strict=False):
            out.result.tokens[run.job] = tokens[-1]
            if len(tokens) > 1:
                out.result.accepted[run.job] = len(tokens) - 1
            if self._requests[run.job][0].sampling.logprobs is not None:
                of_rows += range(first, first + len(tokens))
        if of_rows:
            asked = logits if len(of_rows) == len(logits) else logits[on_device(of_rows, logits.device)]
            self._add_logprobs(runs, drawn, asked, out)
        self._guess(runs, entries, drawn, out)

    def _verified(
        self, runs: Sequence[Run], logits: Tensor, firsts: Sequence[int], meanwhile: Meanwhile | None
    ) -> list[list[int]]:
        """Draw each run's tokens from its rows of `logits`, from row `firsts[i]` on: the first one, and the next one as long as the
        token that was drawn is the guess that the next row was computed with.

        That is the rejection rule for guesses that are certain: a guess is kept with its probability, and otherwise the token is
        drawn from the others. Each token takes its own numbers from the request's generator, so a seeded reply is the same.
        """
        samplers = [self._requests[run.job][1] for run in runs]
        limits = [self._constraints.get(run.job) for run in runs]
        drawn: list[list[int]] = [[] for _ in runs]
        going, position = list(range(len(runs))), 0
        while going:
            rows = [firsts[i] + position for i in going]
            masked = [(row, each) for row, i in zip(rows, going, strict=True) if (each := limits[i]) is not None]
            self._masks.apply(logits, masked, position)
            of_rows = logits if len(rows) == len(logits) else logits[on_device(rows, logits.device)]
            tokens = sample(of_rows, [samplers[i] for i in going], meanwhile)
            for i, token in zip(going, tokens, strict=True):
                drawn[i].append(token)
            going = [i for i in going if _goes_on(runs[i], drawn[i], limits[i])]
            position += 1
        return drawn

    def _add_logprobs(self, runs: Sequence[Run], drawn: Sequence[list[int]], logits: Tensor, out: RunOutput) -> None:
        """Compute log-probabilities of the tokens drawn for requests that ask for them. `logits`: of these, one row each."""
        tokens: list[int] = []
        tops: list[int] = []
        for run, own in zip(runs, drawn, strict=True):
            top = self._requests[run.job][0].sampling.logprobs
            if top is not None:
                tokens += own
                tops += [top] * len(own)
        found = iter(logprobs_of(logits, tokens, tops))
        for run, own in zip(runs, drawn, strict=True):
            if self._requests[run.job][0].sampling.logprobs is not None:
                out.logprobs[run.job] = list(islice(found, len(own)))

    def _guess(
        self, runs: Sequence[Run], entries: Sequence[BatchEntry], drawn: Sequence[list[int]], out: RunOutput
    ) -> None:
        """Guess what comes next, and have the masks of that computed."""
        if self._guesser is not None:
            for run, tokens in zip(runs, drawn, strict=True):
                self._guesser.drew(run.job, tokens)
            out.guesses = self._guesser.guesses(
                [(run.job, entry.stop) for run, entry in zip(runs, entries, strict=True)]
            )
        taken: list[Drawn] = []
        for run, tokens in zip(runs, drawn, strict=True):
            constraint = self._constraints.get(run.job)
            if constraint is None:
                continue
            if constraint.error is not None:
                out.broken[run.job] = self._broken_grammar(run.job, constraint.error)
                continue
            guesses = out.guesses.get(run.job)
            if guesses:  # what the grammar forbids is cut now; only masks can wait
                constraint.took(tokens)
                out.guesses[run.job] = guesses = guesses[: constraint.allowed(guesses)]
            taken.append((constraint, () if guesses is not None else tokens, guesses or ()))
        self._masks.drew(taken)

    def _broken_grammar(self, job: int, error: str) -> RequestError:
        grammar = self._requests[job][0].sampling.grammar
        assert grammar is not None
        return RequestError(f"the reply cannot follow its grammar: {error}", param=grammar.param)

    def _prompt_logprobs(self, request: Request, entry: BatchEntry, hidden: Tensor, top: int) -> list[TokenLogprob]:
        """Compute log-probabilities of prompt tokens [start + 1, stop + 1), as far as the prompt goes."""
        targets = list(request.prompt[entry.start + 1 : entry.stop + 1])
        rows = hidden[entry.where]
        found: list[TokenLogprob] = []
        for i in range(0, len(targets), LOGIT_ROWS):
            piece = targets[i : i + LOGIT_ROWS]
            found += logprobs_of(self._decoder.logits(rows[i : i + len(piece)]), piece, [top] * len(piece))
        return found


def _drawn_rows(run: Run, entry: BatchEntry) -> range:
    """List the rows of the batch that a run draws from: its last own one, and those of guesses."""
    return range(entry.where.stop - 1 - run.guessed, entry.where.stop)


def _goes_on(run: Run, drawn: Sequence[int], constraint: Constraint | None) -> bool:
    """Tell whether a further token is drawn from the row of the next guess."""
    count = len(drawn)
    if count > run.guessed or drawn[-1] != run.tokens[run.own + count - 1]:
        return False
    return constraint is None or constraint.positions > count
