"""Hardware, models and prices by name; the data are in `sim/data/*.toml`, each row with its source.

A model may also be any Hugging Face `config.json`, and prices may be a file of the user's own (TOML or JSON):

    dram_gb_hour = 0.005        # dollars per GiB of host memory and hour
    ssd_gb_hour = 0.0001
    [devices]
    H100 = 2.5                  # dollars per device and hour, by the catalogue's names
"""

from __future__ import annotations

import functools
import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, cast

from afterglow.config import format_size
from afterglow.errors import ConfigError
from afterglow.sim.machine.shape import ModelShape
from afterglow.sim.nearest import find, unknown

DATA = Path(__file__).parents[1] / "data"
GIB = 2**30
RESERVE = 0.1  # of a device's memory, for activations and the allocator

Kind = Literal["gpu", "cpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One device. Bandwidths in bytes per second, `flops` dense matrix arithmetic per second in half precision (float32
    on CPUs), `vector_flops` half precision outside of the matrix units; peaks, except for `host_link_bandwidth`."""

    name: str
    kind: Kind
    memory_bytes: int
    flops: float
    memory_bandwidth: float
    host_link_bandwidth: float
    vector_flops: float | None = None
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Dollars per hour: of a device, by its name, and of a GiB of host memory and of disk."""

    name: str
    devices: Mapping[str, float] = field(default_factory=dict)
    dram_gb_hour: float
    ssd_gb_hour: float
    source: str = ""

    def device_hour(self, hardware: str) -> float:
        """Look up what an hour of a device costs. Raises: ConfigError, if these prices have none for it."""
        found = find(hardware, self.devices)
        if found is None:
            raise ConfigError(
                f"the prices {self.name!r} have none for {hardware}, only for {', '.join(self.devices) or 'nothing'}; "
                "give a file of your own with it under [devices]"
            )
        return self.devices[found]

    def storage_hour(self, dram_bytes: float, ssd_bytes: float) -> float:
        return (self.dram_gb_hour * dram_bytes + self.ssd_gb_hour * ssd_bytes) / GIB


def hardware(name: str) -> Hardware:
    """Look up a device by name. Raises: ConfigError, with the nearest names."""
    if (known := find(name, all_hardware())) is None:
        raise unknown("hardware", name, all_hardware())
    return all_hardware()[known]


def model(name: str) -> ModelShape:
    """Look up a model of the catalogue, or read a `config.json` or its folder. Raises: ConfigError, ModelError."""
    if (known := find(name, all_models())) is not None:
        return all_models()[known]
    if name and Path(name).exists():
        return ModelShape.from_config(name)
    raise unknown("model", name, all_models(), "(a config.json, or a folder with one, will do as well)")


def prices(name: str) -> Prices:
    """Look up a price list of the catalogue, or read a user's file. Raises: ConfigError."""
    if (known := find(name, all_prices())) is not None:
        return all_prices()[known]
    path = Path(name)
    if path.is_file():
        return _price_list(_read(path), name, str(path))
    raise unknown("prices", name, all_prices(), "(a TOML or JSON file of your own will do as well)")


@functools.cache
def all_hardware() -> Mapping[str, Hardware]:
    return MappingProxyType({name: _device(name, row) for name, row in _read(DATA / "hardware.toml").items()})


@functools.cache
def all_models() -> Mapping[str, ModelShape]:
    return MappingProxyType({name: _shape(name, row) for name, row in _read(DATA / "models.toml").items()})


@functools.cache
def all_prices() -> Mapping[str, Prices]:
    rows = _read(DATA / "prices.toml")
    return MappingProxyType({name: _price_list(row, name, row["source"]) for name, row in rows.items()})


def kv_room(shape: ModelShape, device: Hardware, devices: int = 1, dtype: str = "float16") -> int:
    """Compute the bytes for keys and values on `devices` devices that share a model's weights, a part of the memory aside (see
    `RESERVE`). Raises: ConfigError, if the model does not fit."""
    if devices < 1:
        raise ConfigError(f"the number of devices must be 1 or more, got {devices}")
    memory, weights = devices * device.memory_bytes, shape.weight_bytes(dtype)
    room = int(memory * (1 - RESERVE)) - weights
    if room < shape.kv_bytes_per_token(dtype):
        needed = math.ceil(weights / (device.memory_bytes * (1 - RESERVE)))
        raise ConfigError(
            f"{shape.name} does not fit: its weights are {format_size(weights)} as {dtype}, {devices} {device.name} have "
            f"{format_size(memory)}, and {RESERVE:.0%} are kept free; it takes {max(needed, devices + 1)} devices"
        )
    return room


def _device(name: str, row: Mapping[str, Any]) -> Hardware:
    values = dict(row)
    memory = int(values.pop("memory_gib") * GIB)
    return Hardware(name=name, memory_bytes=memory, **values)


def _shape(name: str, row: Mapping[str, Any]) -> ModelShape:
    values = dict(row)
    note = values.pop("note", "")
    values.setdefault("kv_heads", values["heads"])
    values.setdefault("head_dim", values["hidden"] // values["heads"])
    return ModelShape(name=name, source=note or "its authors' config.json", **values)


def _price_list(row: Mapping[str, Any], name: str, source: str) -> Prices:
    """Read a price list. Raises: ConfigError, which names the field."""
    devices = row.get("devices", {})
    if not isinstance(devices, Mapping):
        raise ConfigError(f"the prices {name!r}: devices must be a table of names and dollars per hour")
    strange = [key for key in row if key not in ("devices", "dram_gb_hour", "ssd_gb_hour", "source")]
    if strange:
        raise ConfigError(
            f"the prices {name!r} have {strange[0]!r}, which means nothing; there are devices, dram_gb_hour, ssd_gb_hour"
        )
    return Prices(
        name=name,
        devices=MappingProxyType({key: _price(name, key, value) for key, value in devices.items()}),
        dram_gb_hour=_price(name, "dram_gb_hour", row.get("dram_gb_hour")),
        ssd_gb_hour=_price(name, "ssd_gb_hour", row.get("ssd_gb_hour")),
        source=source,
    )


def _price(name: str, key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
        said = "there is none" if value is None else f"not {value!r}"
        raise ConfigError(f"the prices {name!r}: {key} must be dollars per hour, {said}")
    return float(value)


def _read(path: Path) -> dict[str, Any]:
    """Read a TOML or JSON file. Raises: ConfigError."""
    try:
        data = path.read_bytes()
        if path.suffix == ".json":
            found = json.loads(data)
        else:
            found = tomllib.loads(data.decode())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is neither TOML nor JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} has to be a table of names and values")
    return cast(dict[str, Any], found)
