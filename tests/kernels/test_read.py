"""Reads of the compiled kernels: the bytes and checksums that Python's own reads find, and the system's errors by their numbers."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import google_crc32c
import numpy as np
import numpy.typing as npt
import pytest

from afterglow.kernels.built import Native, native
from afterglow.memory.pages import allocate
from afterglow.store.extents.chunks import BEGUN, LEFT_OUT, TAKEN_BACK, WANTED
from afterglow.store.extents.files import supports_direct

KIB = 1024


def test_states_have_the_same_numbers(library: Native) -> None:
    lib = library.lib
    told = (lib.AFTERGLOW_WANTED, lib.AFTERGLOW_TAKEN_BACK, lib.AFTERGLOW_BEGUN, lib.AFTERGLOW_LEFT_OUT)
    assert told == (WANTED, TAKEN_BACK, BEGUN, LEFT_OUT)


@pytest.fixture
def library() -> Native:
    found = native()
    if found is None:
        pytest.skip("no compiled kernels")
    return found


@pytest.fixture(params=[0, 1], ids=["piece after piece", "by a ring"])
def by_ring(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def written(folder: Path, num_bytes: int) -> tuple[Path, npt.NDArray[np.uint8]]:
    file = folder / "file"
    contents = np.random.default_rng(num_bytes).integers(0, 256, num_bytes, np.uint8)
    file.write_bytes(contents.tobytes())
    return file, contents


class Read:
    """A read of `slots` in each of `planes` of an arena of noise, from `offset` on."""

    def __init__(
        self, library: Native, chunk: int, planes: int, slots: list[int], head: int = 0, offset: int = 0
    ) -> None:
        self.head = np.zeros(head, np.uint8)
        size = planes * (max(slots) + 1) * chunk
        self.arena = allocate(size).reshape(planes, -1, chunk)  # at a page, as the store's: chunks go there by vectors
        self.arena[:] = 7
        self.slots = np.array(slots)
        self.places = np.array(slots, np.int64) * chunk
        self.sums = np.zeros((planes, len(slots)), np.uint32)
        self.library, self.offset = library, offset

    def fields(self, descriptor: int) -> tuple[int, ...]:
        planes, _, chunk = self.arena.shape
        return (
            *(descriptor, self.offset, self.head.ctypes.data, self.head.nbytes),
            *(self.arena.ctypes.data, self.arena[0].nbytes, planes),
            *(self.places.ctypes.data, len(self.places), chunk, self.sums.ctypes.data),
        )

    def carry_out(self, file: Path, by_ring: int) -> int:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            reading = self.library.new("afterglow_reading *", self.fields(descriptor))
            return int(self.library.lib.afterglow_read(reading, 1, 0, by_ring))
        finally:
            os.close(descriptor)

    def check(self, contents: npt.NDArray[np.uint8]) -> None:
        """Compare all that has come, and nothing else, with the contents of the file."""
        offset, head = self.offset, self.head.nbytes
        assert (self.head == contents[offset : offset + head]).all()
        planes, blocks, chunk = len(self.arena), len(self.places), self.arena.shape[2]
        wanted = contents[offset + head :][: planes * blocks * chunk].reshape(planes, blocks, chunk)
        assert (self.arena[:, self.slots] == wanted).all()
        others = np.setdiff1d(np.arange(self.arena.shape[1]), self.slots)
        assert (self.arena[:, others] == 7).all()
        assert self.sums.tolist() == [[google_crc32c.value(block) for block in plane] for plane in wanted]


@pytest.mark.parametrize(
    ("chunk", "planes", "slots", "head", "offset"),
    [
        (4 * KIB, 1, [0], 0, 0),
        (4 * KIB, 2, [3, 1, 2, 9], 8 * KIB, 0),
        (1001, 3, [5, 6, 0], 33, 17),  # not by eights, and from anywhere
        (20 * KIB + 32, 3, [4, 0, 1, 2], 0, 0),  # by vectors, but not to the end; more than is carried at once
        (64 * KIB, 24, [0, 1, 2, 3], 12 * KIB, 0),  # several pieces
        (64 * KIB, 24, [8, 2, 4, 0], 0, 4 * KIB),
        (512, 2, [*range(0, 3000, 2)], 0, 0),  # more buffers than one call takes
        (1024 * KIB, 40, [1], 4 * KIB, 0),  # more pieces than a ring has room for
    ],
)
def test_bytes_and_sums(
    tmp_path: Path, library: Native, by_ring: int, chunk: int, planes: int, slots: list[int], head: int, offset: int
) -> None:
    read = Read(library, chunk, planes, slots, head, offset)
    file, contents = written(tmp_path, offset + head + planes * len(slots) * chunk + 100)
    assert read.carry_out(file, by_ring) == 0
    read.check(contents)


class Parts:
    """Reads of small parts of some files, from anywhere, each to memory of its own."""

    def __init__(self, library: Native, files: list[Path], contents: list[npt.NDArray[np.uint8]], count: int) -> None:
        draw = np.random.default_rng(0)
        self.library, self.files, self.contents = library, files, contents
        self.states = np.zeros(count, np.uint8)
        self.which = draw.integers(0, len(files), count)
        self.reads = []
        for at in self.which:
            parts, size = int(draw.integers(1, 4)), int(draw.choice([100, 4096, 33 * KIB]))
            offset = int(draw.integers(0, contents[at].nbytes - parts * size + 1))
            self.reads.append(Read(library, size, 1, draw.permutation(parts + 1)[:parts].tolist(), offset=offset))

    def carry_out(self, by_ring: int, flags: int = 0) -> int:
        descriptors = [os.open(file, os.O_RDONLY | flags) for file in self.files]
        try:
            fields = [read.fields(descriptors[at]) for at, read in zip(self.which, self.reads, strict=True)]
            readings = self.library.new("afterglow_reading[]", fields)
            lib = self.library.lib
            return int(lib.afterglow_read(readings, len(fields), self.states.ctypes.data, by_ring))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def check(self) -> None:
        for at, state, read in zip(self.which, self.states, self.reads, strict=True):
            if state == LEFT_OUT:
                assert (read.arena == 7).all()
                assert not read.sums.any()
            else:
                assert state in (BEGUN, TAKEN_BACK)  # the latter too late
                read.check(self.contents[at])


def files_of(folder: Path, sizes: list[int]) -> tuple[list[Path], list[npt.NDArray[np.uint8]]]:
    found = []
    for size in sizes:
        (folder / str(size)).mkdir()
        found.append(written(folder / str(size), size))
    return [file for file, _ in found], [contents for _, contents in found]


@pytest.mark.parametrize("count", [2, 17, 300])
def test_many_parts_of_several_files(tmp_path: Path, library: Native, by_ring: int, count: int) -> None:
    files, contents = files_of(tmp_path, [200 * KIB, 400 * KIB, 1200 * KIB])
    for flags in (0, os.O_DIRECT) if supports_direct(tmp_path) else (0,):
        parts = Parts(library, files, contents, count)
        assert parts.carry_out(by_ring, flags) == 0
        assert (parts.states == BEGUN).all()
        parts.check()


def test_parts_that_are_taken_back_are_left_out(tmp_path: Path, library: Native, by_ring: int) -> None:
    files, contents = files_of(tmp_path, [200 * KIB, 400 * KIB])
    parts = Parts(library, files, contents, 60)
    parts.states[::3] = TAKEN_BACK
    assert parts.carry_out(by_ring) == 0
    assert (parts.states[::3] == LEFT_OUT).all()
    parts.check()


def test_parts_that_are_taken_back_meanwhile_are_read_or_left_out(
    tmp_path: Path, library: Native, by_ring: int
) -> None:
    files, contents = files_of(tmp_path, [200 * KIB, 400 * KIB])
    for _ in range(20):
        parts = Parts(library, files, contents, 200)
        beside = threading.Thread(
            target=lambda found=parts: found.states.__setitem__(found.states == WANTED, TAKEN_BACK)
        )
        beside.start()
        assert parts.carry_out(by_ring) == 0
        beside.join()
        parts.check()


def test_all_parts_taken_back(tmp_path: Path, library: Native, by_ring: int) -> None:
    files, contents = files_of(tmp_path, [200 * KIB])
    parts = Parts(library, files, contents, 5)
    parts.states[:] = TAKEN_BACK
    assert parts.carry_out(by_ring) == 0
    assert (parts.states == LEFT_OUT).all()
    parts.check()


def test_a_fault_of_one_part_is_that_of_the_call(tmp_path: Path, library: Native, by_ring: int) -> None:
    """What was begun is read when the call is repeated."""
    files, contents = files_of(tmp_path, [200 * KIB, 400 * KIB])
    parts = Parts(library, files, contents, 60)
    os.truncate(files[1], 0)
    assert parts.carry_out(by_ring) == -1
    files[1].write_bytes(contents[1].tobytes())
    assert parts.carry_out(by_ring) == 0
    parts.check()
    parts.files[1] = tmp_path
    assert parts.carry_out(by_ring) == errno.EISDIR


def test_opening_a_file_that_is_as_it_should_be(tmp_path: Path, library: Native) -> None:
    file, contents = written(tmp_path, 5000)
    for direct in (0, 1) if supports_direct(tmp_path) else (0,):
        descriptor = library.lib.afterglow_open(os.fsencode(file), 5000, direct)
        assert descriptor >= 0
        assert bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT) == bool(direct)
        assert not os.get_inheritable(descriptor)
        assert direct or os.read(descriptor, 6000) == contents.tobytes()
        os.close(descriptor)


@pytest.mark.parametrize("wrong", ["absent", "size", "link", "fifo", "folder", "linked folder", "linked above", "long"])
def test_opening_what_is_not_as_it_should_be(tmp_path: Path, library: Native, wrong: str) -> None:
    above = tmp_path / "extents"
    folder = above / "ab"
    folder.mkdir(parents=True)
    file, size = folder / "file", 5000
    written(folder, 5000)
    match wrong:
        case "absent":
            file.unlink()
        case "size":
            size = 5001
        case "link":
            file.rename(tmp_path / "real")
            file.symlink_to(tmp_path / "real")
        case "fifo":
            file.unlink()
            os.mkfifo(file)
        case "folder":
            file.unlink()
            file.mkdir()
            size = file.stat().st_size
        case "linked folder" | "linked above":
            moved = folder if wrong == "linked folder" else above
            moved.rename(tmp_path / "moved")
            moved.symlink_to(tmp_path / "moved")
        case "long":
            file = Path("/" + "x/" * 4000)
    before = os.listdir("/proc/self/fd")
    assert library.lib.afterglow_open(os.fsencode(file), size, 0) == -1
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("missing", [1, 64 * KIB, 900 * KIB, 24 * 64 * KIB])
def test_a_file_that_ends_early(tmp_path: Path, library: Native, by_ring: int, missing: int) -> None:
    read = Read(library, 64 * KIB, 24, [0])
    file, _ = written(tmp_path, 24 * 64 * KIB - missing)
    assert read.carry_out(file, by_ring) == -1


def test_an_error_of_the_system(library: Native, by_ring: int) -> None:
    """Where nothing is mapped, a process's memory is a file that cannot be read."""
    assert Read(library, 64 * KIB, 24, [0], offset=4 * KIB).carry_out(Path("/proc/self/mem"), by_ring) == errno.EIO


def test_a_folder(tmp_path: Path, library: Native, by_ring: int) -> None:
    assert Read(library, 64 * KIB, 24, [0]).carry_out(tmp_path, by_ring) == errno.EISDIR


def test_reads_at_the_same_time(tmp_path: Path, library: Native) -> None:
    """There are more of them than rings, and after faults too rings serve the next read."""
    file, contents = written(tmp_path, 24 * 64 * KIB)
    reads = [Read(library, 64 * KIB, 24, [n]) for n in range(8)]
    faults: list[int] = []

    def work(read: Read) -> None:
        for _ in range(5):
            faults.append(Read(library, 64 * KIB, 25, [0]).carry_out(file, 1))
            read.arena[:] = 7
            assert read.carry_out(file, 1) == 0

    threads = [threading.Thread(target=work, args=(read,)) for read in reads]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == [-1] * 40
    for read in reads:
        read.check(contents)


@pytest.mark.parametrize("why", [errno.EPERM, errno.EAGAIN])
def test_a_ring_that_the_system_refuses_from_now_on(tmp_path: Path, library: Native, why: int) -> None:
    """A service manager may do so while the process runs. The read at hand and those after it do without."""
    file, contents = written(tmp_path, 24 * 64 * KIB)

    def work() -> None:
        assert Read(library, 64 * KIB, 24, [0]).carry_out(file, 1) == 0  # makes a ring of the child's own, where it may
        refuse_rings(why)
        for _ in range(2):
            read = Read(library, 64 * KIB, 24, [0])
            assert read.carry_out(file, 1) == 0
            read.check(contents)
            parts = Parts(library, [file], [contents], 40)
            assert parts.carry_out(1) == 0
            parts.check()

    in_a_new_process(work)


def refuse_rings(why: int) -> None:
    """Let the system answer requests to rings of this thread with an error, as seccomp filters of containers do."""
    load, equal, give = 0x20, 0x15, 0x06  # of a word at an offset; jump; return
    rules = ((load, 0, 0, 0), (equal, 0, 1, 426), (give, 0, 0, 0x50000 | why), (give, 0, 0, 0x7FFF0000))
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
    found = ctypes.create_string_buffer(struct.pack("HP", len(rules), ctypes.addressof(program)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, found):
        raise OSError(ctypes.get_errno(), "no seccomp")


def in_a_new_process(work: Callable[[], None]) -> None:
    child = os.fork()
    if not child:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_child_process_reads_too(tmp_path: Path, library: Native) -> None:
    """Rings are its parent's: it makes one of its own."""
    file, contents = written(tmp_path, 24 * 64 * KIB)
    Read(library, 64 * KIB, 24, [0]).carry_out(file, 1)

    def work() -> None:
        read = Read(library, 64 * KIB, 24, [0])
        assert read.carry_out(file, 1) == 0
        read.check(contents)

    in_a_new_process(work)
    again = Read(library, 64 * KIB, 24, [0])
    assert again.carry_out(file, 1) == 0
    again.check(contents)
