"""Turn the last layer's hidden rows into tokens and log-probabilities."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from afterglow.engine.gather import BatchEntry
from afterglow.engine.grammars.masks import Constraint, Masks
from afterglow.engine.requests import stop_tokens
from afterglow.engine.sampling import Sampler, logprobs_of, sample
from afterglow.model.decoder import Decoder
from afterglow.plan.step import Run, StepResult
from afterglow.request import Request, Selected, TokenLogprob

LOGIT_ROWS = 256  # rows of logits at a time for prompt log-probabilities, so that a long prompt needs little memory


@dataclass(slots=True)
class RunOutput:
    """Hold a step's result for the plan, and what only the callers need, by job."""

    result: StepResult
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[int, list[TokenLogprob]]] = field(default_factory=dict)  # with their first row
    selected: dict[int, Selected] = field(default_factory=dict)
    broken: dict[int, str] = field(default_factory=dict)  # jobs that cannot go on, and why: their tokens are void

    def add(self, other: RunOutput) -> None:
        """Add the outputs of other runs of the same step."""
        self.result.tokens.update(other.result.tokens)
        self.result.failed.update(other.result.failed)
        self.logprobs.update(other.logprobs)
        self.prompt_logprobs.update(other.prompt_logprobs)
        self.selected.update(other.selected)
        self.broken.update(other.broken)


class TokenOutputs:
    """Draw tokens as each request asks for."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._eos = frozenset(decoder.spec.eos_ids)
        self._requests: dict[int, tuple[Request, Sampler]] = {}
        self._constraints: dict[int, Constraint] = {}
        self._masks = Masks()

    def register(self, job: int, request: Request, constraint: Constraint | None) -> None:
        """Prepare the sampler of a request, and the first mask of its grammar."""
        sampling = request.sampling
        stops = stop_tokens(sampling, self._eos) if constraint is None else ()  # masks have these
        self._requests[job] = request, Sampler.of(sampling, self._decoder.device, request.prompt, stops)
        if constraint is not None:
            self._constraints[job] = constraint
            self._masks.begin(constraint)

    def shorten(self, job: int, prompt: bytes) -> None:
        """Note that a prompt was cut to these tokens."""
        shaping = self._requests[job][1].shaping
        if shaping is not None:
            shaping.shorten(memoryview(prompt).cast("I"))

    def forget(self, job: int) -> None:
        """Forget a request."""
        del self._requests[job]
        self._constraints.pop(job, None)

    def logit_rows(self, runs: Sequence[Run], entries: Sequence[BatchEntry], rows: int) -> list[int] | None:
        """List the rows of the batch that need logits; None: all `rows` rows do."""
        if any(self._requests[run.job][0].sampling.prompt_logprobs is not None for run in runs):
            return None
        found = [entry.where.stop - 1 for run, entry in zip(runs, entries, strict=True) if run.sample]
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
    ) -> RunOutput:
        """Draw a token for each run that asks for one.

        `hidden`: the rows `logit_rows` of the batch. `failed`: jobs whose rows are void, and the extents that failed them.
        `left`: jobs that have left the pass.
        """
        drawing = [i for i, run in enumerate(runs) if run.sample and run.job not in failed and run.job not in left]
        out = RunOutput(StepResult({}, failed))
        if drawing:
            last = [entries[i].where.stop - 1 for i in drawing]
            places = last if logit_rows is None else [logit_rows.index(row) for row in last]
            rows = torch.tensor(places, device=hidden.device)
            logits = self._decoder.logits(hidden if len(rows) == len(hidden) else hidden[rows])
            jobs = [runs[i].job for i in drawing]
            asked = [self._requests[job] for job in jobs]
            constrained = [(n, self._constraints[job]) for n, job in enumerate(jobs) if job in self._constraints]
            self._masks.apply(logits, constrained)
            tokens = sample(logits, [sampler for _, sampler in asked])
            out.result.tokens.update(zip(jobs, tokens, strict=True))
            tops = {n: r.sampling.logprobs for n, (r, _) in enumerate(asked) if r.sampling.logprobs is not None}
            if tops:
                of_rows = list(tops)
                found = logprobs_of(logits[of_rows], [tokens[n] for n in of_rows], list(tops.values()))
                out.logprobs = {jobs[n]: lp for n, lp in zip(of_rows, found, strict=True)}
            out.broken = {jobs[n]: each.error for n, each in constrained if each.error is not None}
            self._masks.drew([(each, tokens[n]) for n, each in constrained if each.error is None])
        for run, entry in zip(runs, entries, strict=True):
            request, _ = self._requests[run.job]
            top = request.sampling.prompt_logprobs
            if top is not None and run.start < len(request.prompt) and run.job not in failed:
                out.prompt_logprobs[run.job] = (run.start, self._prompt_logprobs(request, entry, hidden, top))
        return out

    def _prompt_logprobs(self, request: Request, entry: BatchEntry, hidden: Tensor, top: int) -> list[TokenLogprob]:
        """Compute log-probabilities of prompt tokens [start + 1, stop + 1), as far as the prompt goes."""
        targets = list(request.prompt[entry.start + 1 : entry.stop + 1])
        rows = hidden[entry.where]
        found: list[TokenLogprob] = []
        for i in range(0, len(targets), LOGIT_ROWS):
            piece = targets[i : i + LOGIT_ROWS]
            found += logprobs_of(self._decoder.logits(rows[i : i + len(piece)]), piece, [top] * len(piece))
        return found
