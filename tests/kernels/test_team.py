"""Threads that share the work of the compiled functions: `native/team.c`."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from afterglow.kernels.built import native
from afterglow.kernels.matrix import Panels

pytestmark = pytest.mark.skipif(native() is None, reason="nothing has been built here")


@pytest.fixture(params=[2, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def helpers() -> int:
    names = []
    for task in os.listdir("/proc/self/task"):
        # A thread that a test before has left may end meanwhile.
        with (
            contextlib.suppress(FileNotFoundError, ProcessLookupError),
            open(f"/proc/self/task/{task}/comm") as comm,
        ):
            names.append(comm.read().strip())
    return names.count("afterglow-team")


def test_calls_one_after_another_and_after_a_pause(threads: int) -> None:
    matrix, x = Panels(torch.randn(3000, 128)), torch.randn(7, 128)
    wanted = matrix(x)
    for i in range(300):
        assert torch.equal(matrix(x), wanted)
        if i % 100 == 0:
            time.sleep(0.01)  # they have gone to sleep by then
    assert helpers() >= threads - 1


def test_several_that_call_at_once(threads: int) -> None:
    matrices = [Panels(torch.randn(2000 + i, 96)) for i in range(4)]
    x = torch.randn(5, 96)
    wanted = [matrix(x) for matrix in matrices]
    wrong: list[int] = []

    def call(i: int) -> None:
        wrong.extend(i for _ in range(200) if not torch.equal(matrices[i](x), wanted[i]))

    callers = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_a_child_process_has_a_team_of_its_own(threads: int) -> None:
    matrix, x = Panels(torch.randn(3000, 128)), torch.randn(7, 128)
    wanted = matrix(x)
    child = os.fork()
    if child == 0:
        same = all(torch.equal(matrix(x), wanted) for _ in range(50))
        os._exit(0 if same and helpers() >= threads - 1 else 1)
    deadline = time.monotonic() + 30
    ended, status = 0, 0
    while not ended and time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.01)
    if not ended:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert ended, "the child waited for threads that it does not have"
    assert status == 0
