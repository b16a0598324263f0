"""A pretend CUDA device: tensors say `cuda:0` and hold a CPU tensor, values are real, and what a real device refuses raises.

It stands on PyTorch's Python-only backend hooks (torch.utils.backend_registration), which are experimental: see `KNOWN`.
Values are computed at once; what a real device would do later or wait for is left to `watching.py`. Everything here changes
torch itself: it is for a process of its own, see `play.py` and `plugin.py`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import types
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests import doors
from tests.device.doors import schema, slots_of
from tests.device.graphs import CUDAGraph, Recording, recorded, writing
from tests.device.watching import Current, Event, Stream, watch

KNOWN = ("2.13",)  # versions of torch that all scenes have run with
NATIVE = torch.device("privateuseone", 0)  # as C++ sees it: a CPU build has a guard for it
SEEN = torch.device("cuda", 0)  # as Python sees it
AWAY = 1 << 60  # bytes, a multiple of all that memory is aligned to
NO_LAUNCH = {
    "empty",
    "empty_strided",
    "empty_like",
    "new_empty",
    "new_empty_strided",
    "detach",
    "lift_fresh",
    "_unsafe_view",
}


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
        watch.held(made, elem)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    device = property(lambda self: SEEN)
    is_cuda = property(lambda self: True)

    def data_ptr(self) -> int:
        """Return an address that is no memory of this process: what is compiled for the CPU ends it there, as on a GPU."""
        return self.elem.data_ptr() + AWAY

    def tolist(self) -> list[Any]:
        _to_host(self.elem)
        return self.elem.tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu()")

    def __repr__(self) -> str:
        return f"Pretend({tuple(self.shape)})"


def _inner(value: Any) -> Any:
    return value.elem if isinstance(value, Pretend) else value


@functools.cache
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


def _to_host(source: torch.Tensor) -> None:
    """Note a copy to the host that is waited for."""
    watch.note("copies to host")
    watch.launch("copy to host", [source], [])
    watch.wait_for_stream(watch.stream)


class _Operator(NamedTuple):
    """Describe an operator. `launches`: it is no view, and more than memory. `writes`: arguments that it changes."""

    name: str
    launches: bool
    writes: tuple[tuple[int, str], ...]


@functools.cache
def _operator(func: Any) -> _Operator:
    described = schema(func)
    name = described.name.split("::")[1]
    view = any(each.alias_info is not None and not each.alias_info.is_write for each in described.returns)
    info = [(at, each.name, each.alias_info) for at, each in enumerate(described.arguments)]
    writes = tuple((at, name) for at, name, alias in info if alias is not None and alias.is_write)
    return _Operator(name, not (view or name in NO_LAUNCH), writes)


def _flat(values: Iterable[Any]) -> list[torch.Tensor]:
    """List the tensors among arguments or results, and in lists of them."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [each for each in value if isinstance(each, torch.Tensor)]
    return found


def _mapped(how: Any, value: Any) -> Any:
    """Change a tensor, or each tensor of a list."""
    if isinstance(value, torch.Tensor):
        return how(value)
    if isinstance(value, list | tuple):
        return type(value)(how(each) if isinstance(each, torch.Tensor) else each for each in value)
    return value


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    operator = _operator(func)
    name = operator.name
    if name == "_to_copy":
        return _to_copy(func, args[0], dict(kwargs))
    if name == "copy_":
        return _copy(*args, **kwargs)
    tensors = _flat((*args, *kwargs.values()))
    on = [each for each in tensors if isinstance(each, Pretend)]
    if name == "_local_scalar_dense" and on:
        _to_host(on[0].elem)
        return func(on[0].elem)
    if name in ("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"):
        out = _attention(name, args, kwargs)
        watch.launch(name, [each.elem for each in on], [out[0].elem, out[1].elem])
        return out
    if on:
        if "for_cpu" in name:
            raise Mismatch(f"{name}: an operator of the CPU on a tensor of the device")
        _check_devices(name, args, tensors)
    made = _on_device(kwargs["device"]) if "device" in kwargs else False
    pinned = kwargs.get("pin_memory")
    kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
    if made:
        kwargs["device"] = torch.device("cpu")
    if not (on or made):
        out = func(*args, **kwargs)
        if pinned:
            watch.locked(out)
        elif watch.pinned and operator.launches:
            _on_host(operator, args, kwargs, tensors)
        return out
    same = {id(each.elem): each for each in on}
    if on:
        args = tuple(_mapped(_inner, each) for each in args)
        kwargs = {key: _mapped(_inner, each) for key, each in kwargs.items()}
    writing(_written(operator, args, kwargs))
    out = func(*args, **kwargs)
    if operator.launches:
        _launched(operator, args, kwargs, out)
        if watch.recorded is not None:
            known = {id(each) for each in _flat((*args, *kwargs.values()))}
            recorded(lambda: func(*args, **kwargs), [each for each in _flat((out,)) if id(each) not in known])
    return _mapped(lambda each: same[id(each)] if id(each) in same else Pretend(each), out)


def _written(operator: _Operator, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """List the arguments that an operator writes to."""
    return _flat(args[at] if at < len(args) else kwargs.get(name) for at, name in operator.writes)


def _launched(operator: _Operator, args: Any, kwargs: Any, out: Any) -> None:
    """Note an operator on tensors of the device."""
    if operator.name == "nonzero" or (
        operator.name == "index" and any(each.dtype == torch.bool for each in _flat(args[1:]))
    ):
        watch.wait_for_stream(watch.stream)  # how many there are is asked of the device
    written = _written(operator, args, kwargs)
    known = {id(each) for each in written}
    reads = [each for each in _flat((*args, *kwargs.values())) if id(each) not in known]
    watch.launch(operator.name, reads, [*written, *(each for each in _flat((out,)) if id(each) not in known)])


def _on_host(operator: _Operator, args: Any, kwargs: Any, tensors: list[Any]) -> None:
    """Note that an operator of the CPU uses pinned memory."""
    used = [each for each in tensors if watch.is_pinned(each)]
    if used:
        written = {id(each) for each in _written(operator, args, kwargs)}
        reads, writes = ([each for each in used if (id(each) in written) is wanted] for wanted in (False, True))
        watch.on_host(operator.name, reads, writes)


def _to_copy(func: Any, source: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
    device = kwargs.pop("device", None)
    later = bool(kwargs.pop("non_blocking", None))
    pinned = kwargs.pop("pin_memory", None)
    to = isinstance(source, Pretend) if device is None else _on_device(device)
    out = func(_inner(source), **kwargs) if kwargs else _inner(source).clone()
    if pinned:
        watch.locked(out)
    copied = Pretend(out) if to else out
    _moved(copied, source, later)
    recorded(lambda: _inner(source).to(out.dtype), [out])
    return copied


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    writing([_inner(target)])
    _inner(target).copy_(_inner(source))
    _moved(target, source, non_blocking)
    recorded(lambda: _inner(target).copy_(_inner(source)), [])
    return target


def _moved(target: torch.Tensor, source: torch.Tensor, later: bool) -> None:
    """Note a copy: on the device, to it, from it, or on the host, as the CUDA backend makes it."""
    to, of = isinstance(target, Pretend), isinstance(source, Pretend)
    host = [each for each in (target, source) if not isinstance(each, Pretend)]
    if not (to or of):
        if watch.pinned:
            watch.on_host("copy_", *([each] if watch.is_pinned(each) else [] for each in (source, target)))
        return
    if host and (target.dtype != source.dtype or not host[0].is_contiguous()):
        watch.note("conversions on the host")  # it makes a copy of that kind first, in pageable memory
        later = False
    pinned = not host or watch.is_pinned(host[0])
    if host:
        watch.note("copies to device" if to else "copies to host")
    watch.launch(
        "copy_",
        [_inner(source)] if of or pinned else [],
        [_inner(target)] if to or pinned else [],
    )  # fmt: skip
    if host and later and pinned:
        watch.copies_pinned(host[0])
    if not host or (later and pinned):
        return
    if later and to and watch.recorded is None:  # CUDA copies the bytes away before it returns
        watch.note("pageable copies")
    else:
        watch.wait_for_stream(watch.stream)


class _Dispatch(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and torch would import its compiler: seconds in each process

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """What asks for a guard of the device, which a CPU build has not, before anything is dispatched."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        if func is torch.Tensor.numpy and watch.pinned and watch.is_pinned(args[0]):
            watch.on_host("numpy", [args[0]], [])
        args = tuple(map(_native, args))
        kwargs = {key: _native(value) for key, value in (kwargs or {}).items()}
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is NATIVE:
            kwargs["device"] = torch.device("cpu")
            made = Pretend(func(*args, **kwargs))
            _moved(made, torch.empty(made.shape, dtype=made.dtype), later=False)
            return made
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and isinstance(args[0], Pretend):
            index = args[1]
            index = tuple(map(_lifted, index)) if isinstance(index, tuple) else _lifted(index)
            args = (args[0], index, *args[2:])
        return func(*args, **kwargs)


_of_thread = threading.local()


@contextlib.contextmanager
def active() -> Iterator[None]:
    """Have this thread see the device."""
    if getattr(_of_thread, "active", False):
        yield
        return
    _of_thread.active = True
    try:
        with _Functions(), _Dispatch():
            yield
    finally:
        _of_thread.active = False


class _Generator(torch.Generator):
    """A generator of the device, which draws as the CPU's."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        return super().__new__(cls, "cpu")


def _native(value: Any) -> Any:
    if isinstance(value, torch.device | str) and str(value).startswith("cuda"):
        return NATIVE
    return value


def _lifted(index: Any) -> Any:
    """CPU indices of a device tensor are copied to it."""
    if isinstance(index, list):
        index = torch.tensor(index)
    if isinstance(index, torch.Tensor) and not isinstance(index, Pretend) and index.dim():
        lifted = Pretend(index)
        watch.note("indices from the host")
        _moved(lifted, index, later=False)
        return lifted
    return index


def install() -> None:
    """Have torch see the device, in this process and from now on. To be called before the package is imported.

    Raises: RuntimeError, with a version of torch that it has not run with.
    """
    version = torch.__version__
    if ".".join(version.split(".")[:2]) not in KNOWN:
        raise RuntimeError(
            f"the pretend device is known to work with torch {' and '.join(KNOWN)}, and this is {version}: install what constraints.txt "
            "names; or add this version to KNOWN in tests/device/pretend.py, and run all of tests/device"
        )
    torch.utils.backend_registration._setup_privateuseone_for_python_backend()
    torch.inference_mode = lambda mode=True: torch.no_grad()  # views of tensors made outside would be refused
    from afterglow.engine.engine import Engine
    from afterglow.engine.loop import EngineLoop
    from afterglow.engine.runner import TorchRunner
    from afterglow.plan.step import Step

    device_module = types.SimpleNamespace(
        Stream=Stream, Event=Event, current_stream=lambda device=None: Stream(number=watch.stream),
        stream=lambda stream: watch.on(stream.number),
    )  # fmt: skip
    module_of = torch.get_device_module
    torch.get_device_module = lambda device=None: device_module if _on_device(device) else module_of(device)
    torch.Generator = _Generator  # type: ignore[misc]
    cuda: Any = torch.cuda
    cuda._lazy_init = lambda: None
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 1
    cuda.get_device_name = lambda device=None: "a pretend device"
    cuda.get_device_capability = lambda device=None: (9, 0)
    cuda.set_device, cuda.device = lambda device: watch.choose(), Current
    cuda.synchronize = lambda device=None: watch.wait_for_stream(watch.stream)
    cuda.empty_cache = lambda: None
    cuda.CUDAGraph, cuda.graph, cuda.graph_pool_handle = CUDAGraph, Recording, object
    cuda.cudart = lambda: watch.runtime
    load, main, step, release = Engine.load.__func__, EngineLoop.run, TorchRunner.run, TorchRunner.release

    def loaded(cls: type[Engine], *args: Any, **kwargs: Any) -> Engine:
        with active():
            return load(cls, *args, **kwargs)

    def run(self: EngineLoop) -> None:
        with active():
            main(self)

    def ran(self: TorchRunner, of: Step) -> Any:
        out = step(self, of)
        watch.reuse_locked(slots_of(self, of.ahead.gathers if of.ahead is not None else ()))
        return out

    def released(self: TorchRunner, of: Step) -> None:
        release(self, of)
        gathers = [gather for run in of.runs for gather in run.gathers]
        watch.reuse_locked(slots_of(self, [*gathers, *(of.ahead.gathers if of.ahead is not None else ())]))

    if os.environ.get("TRITON_INTERPRET"):
        _launch_on_the_cpu()
    Engine.load = classmethod(loaded)  # type: ignore[assignment, method-assign]
    EngineLoop.run = run  # type: ignore[method-assign]
    doors.around_each_step(lambda of, go: watch.in_step(len(of.runs), sum(len(run.tokens) for run in of.runs), go))
    TorchRunner.run = ran  # type: ignore[method-assign]
    TorchRunner.release = released  # type: ignore[method-assign]


def _launch_on_the_cpu() -> None:
    """Have Triton's interpreter run kernels on what the device's tensors hold."""
    from triton.runtime.interpreter import GridExecutor

    from afterglow.engine import prefill_pass

    prefill_pass.ROWS = (8, 16)  # the interpreter takes seconds for more
    launch = GridExecutor.__call__

    def launched(self: Any, *args: Any, **kwargs: Any) -> None:
        for each in (*args, *kwargs.values()):  # kernels may read memory of the host that is locked
            if isinstance(each, torch.Tensor) and not (isinstance(each, Pretend) or watch.is_pinned(each)):
                raise Mismatch(f"{self.fn.__name__}: a tensor on the CPU")
        if not watch.is_current:
            raise Mismatch(f"{self.fn.__name__}: launched on another device, which is the thread's")
        watch.note("launches of Triton")
        watch.note(f"launches of {self.fn.__name__}")
        args, kwargs = tuple(map(_inner, args)), {key: _inner(value) for key, value in kwargs.items()}
        launch(self, *args, **kwargs)
        recorded(lambda: launch(self, *args, **kwargs), [])

    GridExecutor.__call__ = launched


def use_by_default() -> None:
    """Have engines that leave the choice to the package run on the device, in the CPU's dtype."""
    from afterglow.config import EngineConfig
    from afterglow.engine.engine import Engine

    load = Engine.load.__func__

    def loaded(cls: type[Engine], model: Any, config: Any = None, *args: Any, **kwargs: Any) -> Engine:
        config = config or EngineConfig()
        if config.device == "auto":
            config = replace(config, device="cuda", dtype="float32" if config.dtype == "auto" else config.dtype)
        return load(cls, model, config, *args, **kwargs)

    Engine.load = classmethod(loaded)  # type: ignore[assignment, method-assign]
