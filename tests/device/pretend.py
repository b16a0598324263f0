"""A pretend CUDA device: tensors say `cuda:0` and hold a CPU tensor, values are real, and what a real device refuses raises.

It stands on PyTorch's Python-only backend hooks (torch.utils.backend_registration, experimental; known with torch 2.13).
There is one queue of work, so a missing wait for a stream does not show. Everything here changes torch itself: it is for a
process of its own, see `play.py`.
"""

from __future__ import annotations

import contextlib
import types
from collections import Counter
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

NATIVE = torch.device("privateuseone", 0)  # as C++ sees it: a CPU build has a guard for it
SEEN = torch.device("cuda", 0)  # as Python sees it
events: Counter[str] = Counter()


class Mismatch(RuntimeError):
    """Tensors of two devices in one operator."""


class Pretend(torch.Tensor):
    """A tensor on the pretend device."""

    elem: torch.Tensor

    @staticmethod
    def __new__(cls, elem: torch.Tensor) -> Pretend:
        made = torch.Tensor._make_wrapper_subclass(
            cls, elem.size(), strides=elem.stride(), storage_offset=elem.storage_offset(),
            dtype=elem.dtype, layout=elem.layout, device=NATIVE, requires_grad=False,
        )  # fmt: skip
        made.elem = elem
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    device = property(lambda self: SEEN)
    is_cuda = property(lambda self: True)

    def data_ptr(self) -> int:
        return self.elem.data_ptr()

    def tolist(self) -> list[Any]:
        events["synchronise"] += 1
        return self.elem.tolist()

    def record_stream(self, stream: object) -> None:
        events["record_stream"] += 1

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu()")

    def __repr__(self) -> str:
        return f"Pretend({tuple(self.shape)})"


def _inner(value: Any) -> Any:
    return value.elem if isinstance(value, Pretend) else value


def _on_device(device: Any) -> bool:
    return str(device).startswith(("cuda", "privateuse"))


def _explicit(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> Any:
    """Attention by its formula, for CUDA's flash operators."""
    scores = (q.float() @ k.float().transpose(-1, -2)) * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    lse = scores.logsumexp(-1)
    return ((scores - lse[..., None]).exp() @ v.float()).to(q.dtype), lse


def _attention(name: str, args: Any, kwargs: Any) -> Any:
    if any(isinstance(each, torch.Tensor) and not isinstance(each, Pretend) for each in args):
        raise Mismatch(f"{name}: a tensor on the CPU")
    flash = "flash" in name
    at = 4 if flash else 6
    causal = args[at] if len(args) > at else kwargs.get("is_causal", False)
    q, k, v = map(_inner, args[:3])
    if flash and q.dtype not in (torch.float16, torch.bfloat16):
        raise TypeError(f"the flash operator takes no {q.dtype}")
    out, lse = _explicit(q, k, v, causal, kwargs["scale"])
    if not flash:  # it pads its rows to 32
        lse = torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32))
    spare = [Pretend(torch.empty(0, dtype=torch.int64)) for _ in range(5)]
    if flash:
        return Pretend(out), Pretend(lse), spare[0], spare[1], 0, 0, *spare[2:]
    return Pretend(out), Pretend(lse), spare[0], spare[1]


def _check_devices(name: str, args: Any, tensors: list[Any]) -> None:
    on = [each for each in tensors if isinstance(each, Pretend)]
    off = [each for each in tensors if not isinstance(each, Pretend)]
    if name in ("index", "index_put_", "index_put", "_unsafe_index") and on:
        target = isinstance(args[0], Pretend)
        if any(isinstance(each, Pretend) and not target for each in args[1] if each is not None):
            raise Mismatch(f"{name}: indices should be either on cpu or on the same device as the indexed tensor (cpu)")
        if name.startswith("index_put") and isinstance(args[2], Pretend) != target and args[2].dim():
            raise Mismatch(f"{name}: a value on another device")
    elif on and any(each.dim() > 0 for each in off) and name != "lift_fresh":
        raise Mismatch(f"{name}: tensors on cuda:0 and cpu, shapes {[tuple(each.shape) for each in tensors]}")


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    name = func._schema.name.split("::")[1]
    tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.Tensor)]
    on = [each for each in tensors if isinstance(each, Pretend)]
    if name == "_to_copy":
        return _to_copy(func, args[0], dict(kwargs))
    if name == "copy_":
        _inner(args[0]).copy_(_inner(args[1]))
        return args[0]
    if name == "_local_scalar_dense":
        events["synchronise"] += bool(on)
        return func(_inner(args[0]))
    if name in ("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"):
        return _attention(name, args, kwargs)
    if "for_cpu" in name and on:
        raise Mismatch(f"{name}: an operator of the CPU on a tensor of the device")
    _check_devices(name, args, tensors)
    made = _on_device(kwargs.get("device"))
    kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
    if made:
        kwargs["device"] = torch.device("cpu")
    same = {id(each.elem): each for each in on}
    if on:
        args, kwargs = tree_map(_inner, (args, kwargs))
    out = func(*args, **kwargs)
    if not (on or made):
        return out
    return tree_map(lambda x: (same[id(x)] if id(x) in same else Pretend(x)) if isinstance(x, torch.Tensor) else x, out)


def _to_copy(func: Any, source: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
    device = kwargs.pop("device", None)
    kwargs.pop("non_blocking", None)
    kwargs.pop("pin_memory", None)
    to = isinstance(source, Pretend) if device is None else _on_device(device)
    out = func(_inner(source), **kwargs) if kwargs else _inner(source).clone()
    return Pretend(out) if to else out


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """What asks for a guard of the device, which a CPU build has not, before anything is dispatched."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        args = tuple(map(_native, args))
        kwargs = {key: _native(value) for key, value in (kwargs or {}).items()}
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is NATIVE:
            kwargs["device"] = torch.device("cpu")
            return Pretend(func(*args, **kwargs))
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and isinstance(args[0], Pretend):
            index = args[1]
            index = tuple(map(_lifted, index)) if isinstance(index, tuple) else _lifted(index)
            args = (args[0], index, *args[2:])
        return func(*args, **kwargs)


def _native(value: Any) -> Any:
    if isinstance(value, torch.device | str) and str(value).startswith("cuda"):
        return NATIVE
    return value


def _lifted(index: Any) -> Any:
    """CPU indices of a device tensor are copied to it."""
    if isinstance(index, list):
        index = torch.tensor(index)
    if isinstance(index, torch.Tensor) and not isinstance(index, Pretend) and index.dim():
        return Pretend(index)
    return index


class _Stream:
    def wait_stream(self, other: object) -> None:
        events["wait_stream"] += 1

    def wait_event(self, event: object) -> None:
        events["wait_event"] += 1


class _Event:
    def record(self, stream: object = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        events["synchronise"] += 1


class _Runtime:
    """CUDA's own locking of host memory."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.limit = 1 << 62

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if size > self.limit:
            return 2  # cudaErrorMemoryAllocation
        self.locked[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


runtime = _Runtime()


def install() -> None:
    """Have torch see the device, in this process and from now on. To be called before the package is imported."""
    torch.utils.backend_registration._setup_privateuseone_for_python_backend()
    torch.inference_mode = lambda mode=True: torch.no_grad()  # views of tensors made outside would be refused
    from afterglow.engine.engine import Engine
    from afterglow.engine.loop import EngineLoop

    device_module = types.SimpleNamespace(
        Stream=_Stream, Event=_Event, current_stream=lambda device=None: _Stream(),
        stream=lambda stream: contextlib.nullcontext(),
    )  # fmt: skip
    module_of = torch.get_device_module
    torch.get_device_module = lambda device=None: device_module if _on_device(device) else module_of(device)
    cuda: Any = torch.cuda
    cuda._lazy_init = lambda: None
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 1
    cuda.get_device_capability = lambda device=None: (9, 0)
    cuda.set_device = lambda device: None
    cuda.synchronize = lambda device=None: None
    cuda.empty_cache = lambda: None
    cuda.cudart = lambda: runtime
    load, main = Engine.load.__func__, EngineLoop.run

    def loaded(cls: type[Engine], *args: Any, **kwargs: Any) -> Engine:
        with _Functions(), _Dispatch():
            return load(cls, *args, **kwargs)

    def run(self: EngineLoop) -> None:
        with _Functions(), _Dispatch():
            main(self)

    Engine.load = classmethod(loaded)  # type: ignore[assignment, method-assign]
    EngineLoop.run = run  # type: ignore[method-assign]
