"""What a forward pass takes on a machine that is not there: from the shapes, or as it was measured elsewhere."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from afterglow.errors import ConfigError
from afterglow.plan.tiers.cost import MILLION
from afterglow.sim.machine.catalogue import Hardware
from afterglow.sim.machine.shape import ModelShape

FORMAT = 1

PREFILL_EFFICIENCY = 0.59  # of peak FLOP/s: LLaMA-65B on four A100 prefills 2K tokens in 360 ms (CachedAttention §2.3)
DECODE_EFFICIENCY = 0.6  # of peak memory bandwidth; the papers leave it open (see docs/papers.md for the sensitivity)
STEP_OVERHEAD_S = 0.002  # launches, sampling, and what else a pass takes however small it is


class Timing(Protocol):
    """Seconds of one forward pass of `jobs` jobs: `rows` rows computed, `attended` products of rows and context (half a
    product for each pair of new rows), `context` rows read altogether, `gathered` rows brought to the device by the
    same pass, as far as that keeps it from computing."""

    def seconds(self, rows: int, attended: float, context: int, jobs: int, gathered: int = 0) -> float: ...


@dataclass
class Roofline:
    """The longer of arithmetic and memory traffic, each at a fraction of its peak.

    Weights are read once per pass, keys and values of every job's context once. Several devices share both evenly
    (tensor parallelism); what they say to each other is part of the efficiencies.
    """

    model: ModelShape
    hardware: Hardware
    devices: int = 1
    dtype: str = "float16"
    prefill_efficiency: float = PREFILL_EFFICIENCY
    decode_efficiency: float = DECODE_EFFICIENCY
    overhead: float = STEP_OVERHEAD_S

    def seconds(self, rows: int, attended: float, context: int, jobs: int, gathered: int = 0) -> float:
        computing = rows * self._row + jobs * self._job + attended * self._product
        reading = self._weights + context * self._context_row
        return self.overhead + (computing if computing > reading else reading)

    def __post_init__(self) -> None:
        model = self.model
        flops = self.devices * self.hardware.flops * self.prefill_efficiency
        traffic = self.devices * self.hardware.memory_bandwidth * self.decode_efficiency
        self._row = model.linear_flops_per_token / flops
        self._job = model.head_flops / flops
        self._product = 4 * model.layers * model.heads * model.head_dim / flops
        self._weights = model.weight_bytes(self.dtype) / traffic
        self._context_row = model.kv_bytes_per_token(self.dtype) / traffic


@dataclass(frozen=True, slots=True)
class Calibrated:
    """As `afterglow bench calibrate` measured it: two linear fits.

    `prefill`: seconds per pass, row, million attended products, gathered row. `decode`: seconds per step, job, thousand
    context rows.
    """

    prefill: tuple[float, float, float, float]
    decode: tuple[float, float, float]

    def seconds(self, rows: int, attended: float, context: int, jobs: int, gathered: int = 0) -> float:
        if rows == jobs and not gathered:  # one row each, and none is brought: nothing but decoding
            fixed, job, thousand = self.decode
            return fixed + job * jobs + thousand * context / 1e3
        fixed, row, million, gather = self.prefill
        return fixed + row * rows + million * attended / MILLION + gather * gathered


@dataclass(frozen=True, slots=True)
class Calibration:
    """A machine as measured: what passes take, and what the tiers' links carry (bytes/s, and seconds per transfer)."""

    timing: Calibrated
    disk_read: float
    disk_write: float
    disk_latency: float
    model: str
    kv_bytes_per_token: int

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Read a calibration file. Raises: ConfigError."""
        try:
            values = json.loads(Path(path).read_text())
            if values["format"] != FORMAT:
                raise ConfigError(f"{path}: calibration format {values['format']}; this program reads format {FORMAT}")
            timing = Calibrated(_floats(values["prefill"], 4), _floats(values["decode"], 3))  # type: ignore[arg-type]
            return cls(
                timing,
                float(values["disk_read"]),
                float(values["disk_write"]),
                float(values["disk_latency"]),
                str(values["model"]),
                int(values["kv_bytes_per_token"]),
            )
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path} is no calibration file ({error!r}); `afterglow bench calibrate` writes one"
            ) from error

    def packed(self) -> dict[str, Any]:
        """As `load` reads it, for a JSON file."""
        return {
            "format": FORMAT,
            "model": self.model,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "prefill": list(self.timing.prefill),
            "decode": list(self.timing.decode),
            "disk_read": self.disk_read,
            "disk_write": self.disk_write,
            "disk_latency": self.disk_latency,
        }


def _floats(values: list[float], count: int) -> tuple[float, ...]:
    if len(values) != count or not all(float(value) >= 0 for value in values):
        raise ValueError(f"{values!r} are not {count} numbers that are 0 or more")
    return tuple(float(value) for value in values)
