"""The feature projector: a sentence's embedded input -> a vector; near vectors, similar attention maps.

The paper's has two layers (AttnCache, 3.1) and leaves open how inputs of any length fit them, and the layer between.

`positions` (default, not the paper's): one linear layer to 16 numbers for each token, all tokens in their order. Lengths
    have vectors of their own size, and only equal lengths are ever compared. No place is averaged away: see
    benchmarks/papers/attncache/sts.py for what that is worth.
`binned`: tokens are averaged into 16 bins of position and dimensions into 256, with the logarithm of the length beside
    them; then linear, GELU, layer norm, linear, to 128 numbers.
`public`: as the published program has it: padded on the left to `max_tokens`, maximum over 2 x 2, then over pairs of rows
    until at most 128 are left; batch norm, linear, batch norm, linear, nothing in between; 128 numbers.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from afterglow.errors import ConfigError, DamageError
from afterglow.memo.options import ProjectorKind

DIMENSIONS = 128  # of the paper's feature vectors
PER_TOKEN, TOKEN_WIDTH = 16, 512  # of `positions`: numbers a token, of at most so many averaged dimensions
BINS, BINNED_WIDTH = 16, 256
PUBLIC_ROWS = 128
TYPICAL_DISTANCE = 0.25  # of two sentences' maps: what random weights of `positions` begin with


@dataclass(frozen=True, slots=True)
class ProjectorSpec:
    """Which projector. `max_tokens` is the longest input that the kind `public` can take."""

    kind: ProjectorKind
    hidden: int
    max_tokens: int

    def __post_init__(self) -> None:
        if self.kind not in get_args(ProjectorKind):
            raise ConfigError(f"--projector must be one of {', '.join(get_args(ProjectorKind))}, got {self.kind!r}")
        if self.kind == "public" and min(self.hidden, self.max_tokens) < 2:
            raise ConfigError(f"the public projector needs 2 tokens and dimensions or more, got {self.max_tokens}")

    def width(self, tokens: int) -> int:
        """Numbers that an input of `tokens` tokens is reduced to before the first layer."""
        if self.kind == "positions":
            return tokens * min(TOKEN_WIDTH, self.hidden)
        if self.kind == "binned":
            return BINS * min(BINNED_WIDTH, self.hidden) + 1
        rows = self.max_tokens // 2
        while rows > PUBLIC_ROWS:
            rows //= 2
        return rows * (self.hidden // 2)

    def reduce(self, x: Tensor) -> Tensor:
        """Embedded inputs `x` [n, tokens, hidden], equally long -> float32 [n, width(tokens)]; nothing is learned.

        Rounded to half precision, as inputs are while a database is built: an input that is the same then and now
        has distance 0. Raises: ConfigError for an input that is too long.
        """
        return self._reduce(x.float()).half().float()

    def _reduce(self, x: Tensor) -> Tensor:
        n, tokens, hidden = x.shape
        if self.kind == "positions":
            return (x if hidden <= TOKEN_WIDTH else F.adaptive_avg_pool1d(x, TOKEN_WIDTH)).flatten(1)
        if self.kind == "binned":
            bins = F.adaptive_avg_pool2d(x, (BINS, min(BINNED_WIDTH, hidden))).flatten(1)
            return torch.cat((bins, bins.new_full((n, 1), float(tokens)).log()), 1)
        if tokens > self.max_tokens:
            raise ConfigError(f"this projector takes {self.max_tokens} tokens at most, got {tokens}")
        rows = F.max_pool2d(F.pad(x, (0, 0, self.max_tokens - tokens, 0)), 2)
        while rows.shape[1] > PUBLIC_ROWS:
            rows = F.max_pool2d(rows, (2, 1))
        return rows.flatten(1)


class Projector(nn.Module):
    """The trained part: what `ProjectorSpec.reduce` yields -> vectors whose distance predicts that of the maps."""

    shift: Tensor
    scale: Tensor

    def __init__(self, spec: ProjectorSpec, seed: int = 0) -> None:
        super().__init__()
        self.spec = spec
        width = spec.width(1)
        self.register_buffer("shift", torch.zeros(width))
        self.register_buffer("scale", torch.ones(()))
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            if spec.kind == "positions":
                self.layers = nn.Sequential(nn.Linear(width, PER_TOKEN, bias=False))
                for weight in self.parameters():
                    nn.init.normal_(weight, std=TYPICAL_DISTANCE / (2 * width * PER_TOKEN) ** 0.5)
            else:
                first, last = nn.Linear(width, DIMENSIONS), nn.Linear(DIMENSIONS, DIMENSIONS)
                if spec.kind == "binned":
                    self.layers = nn.Sequential(first, nn.GELU(), nn.LayerNorm(DIMENSIONS), last)
                else:
                    self.layers = nn.Sequential(_WholeBatchNorm(), first, nn.BatchNorm1d(DIMENSIONS), last)
        self.eval()

    def standardise(self, reduced: list[Tensor]) -> None:
        """Take over the mean of training inputs, [width] each, and their spread as one number; not for `public`, whose
        first layer does that itself."""
        if self.spec.kind == "public":
            return
        rows = torch.cat([one.view(-1, len(self.shift)).float() for one in reduced])
        self.shift = rows.mean(0)
        self.scale = 1 / (rows - self.shift).pow(2).mean().sqrt().clamp_min(1e-6)

    def forward(self, reduced: Tensor) -> Tensor:
        """[n, width] -> float32 [n, dimensions]."""
        if self.spec.kind == "positions":
            reduced = reduced.view(len(reduced), -1, len(self.shift))
        out: Tensor = self.layers((reduced.float() - self.shift) * self.scale)
        # Per token, so that a distance means the same at every length.
        return out.flatten(1) / out.shape[1] ** 0.5 if self.spec.kind == "positions" else out

    @torch.inference_mode()
    def project(self, x: Tensor) -> Tensor:
        """Embedded inputs [n, tokens, hidden] on any device, equally long -> float32 [n, dimensions] on the host."""
        out: Tensor = self(self.spec.reduce(x).cpu())
        return out

    def save(self, path: Path) -> None:
        """As safetensors, the spec among the metadata."""
        state = {name: value.contiguous() for name, value in self.state_dict().items()}
        save_file(state, path, metadata={"spec": json.dumps(asdict(self.spec))})

    @staticmethod
    def load(path: Path) -> Projector:
        """Read a projector. Raises: DamageError."""
        try:
            with safe_open(path, framework="pt") as file:
                projector = Projector(ProjectorSpec(**json.loads(file.metadata()["spec"])))
                projector.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        except (OSError, SafetensorError, RuntimeError, ValueError, TypeError, KeyError) as error:
            raise DamageError(f"{path} cannot be read ({error}); build the database anew") from None
        return projector.eval()


class _WholeBatchNorm(nn.Module):
    """BatchNorm2d of one channel: all of the input shares a mean and a spread."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x[:, None]).squeeze(1)
        return out
