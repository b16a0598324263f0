"""kill -9 at many moments: afterwards each extent is complete or absent, and the books balance."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from afterglow.store.admin import check
from tests.store.store_kit import Kit, contents, extent_name, name_of

WORKER = f"""
    import sys
    sys.path.insert(0, {str(Path(__file__).parents[2])!r})
    from pathlib import Path
    from tests.store.store_kit import Kit, extent_name, record
    from afterglow.plan.step import Drop, Load, Store
    kit = Kit(Path(sys.argv[1]), slots=64)
    print("ready", flush=True)
    number = 0
    while True:  # what extent n holds depends on n alone
        for n in range(40):
            number += 4
            slots = tuple(range(n % 20, n % 20 + 4))
            kit.store.start([Store(number, record(n, 256), slots)])
            into = tuple(range(40 + 4 * (n % 6), 44 + 4 * (n % 6)))  # never two loads into one slot
            kit.store.start([Load(number + 1, extent_name(n), 256, into)])
            if n % 3 == 0:
                kit.store.start([Drop(number + 2, extent_name(n))])
        assert all(done.ok for done in kit.settle())
"""


@pytest.mark.parametrize("round", range(8))
def test_killed_in_the_middle(tmp_path, round):
    worker = subprocess.Popen([sys.executable, "-c", textwrap.dedent(WORKER), str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert worker.stdout.readline() == b"ready\n"
        time.sleep(random.Random(round).uniform(0.0, 0.15))
    finally:
        worker.kill()
        worker.wait()
        worker.stdout.close()
    with Kit(tmp_path) as kit:
        records = kit.store.records()
        kit.settle()
        files = list(kit.path.glob("extents/*/*"))
        assert len(files) == len(records)
        assert sum(f.stat().st_size for f in files) == kit.store.stats().disk_bytes
        assert sum(record.file_bytes for record in records) == kit.store.stats().disk_bytes
        numbers = {extent_name(n): n for n in range(40)}
        for record in records:
            n = numbers[record.id]
            assert kit.get(n, 256, (40, 41, 42, 43)).ok
            expected = contents(kit.store.arena, tuple(range(n % 20, n % 20 + 4)), 256)
            assert np.array_equal(contents(kit.store.arena, (40, 41, 42, 43), 256), expected)
    report = check(kit.path, name_of=name_of)
    assert report.ok, report.problems
    assert report.extents == len(records)
