"""Caches of other models in the same directory: they are never removed; the operator, who has set a budget, is warned."""

from __future__ import annotations

import logging
import shutil

import pytest

from afterglow.config import format_size
from afterglow.store import admin
from afterglow.store.namespace import neighbours
from afterglow.store.namespace.namespace import Namespace
from tests.store.store_kit import ALIGNED, ODD, Kit

BUDGET = 1 << 20


@pytest.fixture
def ours(tmp_path):
    """Our namespace, with an extent in it."""
    with Kit(tmp_path) as kit:
        assert kit.put(1, 64, (0,)).ok
        yield kit.path


def leave(folder, name, size, digest):
    """A namespace with a file of so many bytes, left behind by another model."""
    with Namespace.open(folder, name, digest, ODD) as namespace:
        namespace.extents.mkdir()
        (namespace.extents / "x").write_bytes(bytes(size))
    return namespace.path


def test_alone_there_is_nothing_to_say(ours, tmp_path):
    (tmp_path / "no namespace").mkdir()
    assert neighbours.others(ours) == []
    assert neighbours.warn(ours, 1) is None


def test_together_within_the_budget_there_is_nothing_to_say(ours, tmp_path):
    leave(tmp_path, "old", 1000, "0a" * 32)
    assert neighbours.excess(ours, BUDGET) is None


def test_what_is_beyond_the_budget_is_named_with_the_remedy(ours, tmp_path, caplog):
    small = leave(tmp_path, "small", 1000, "0a" * 32)
    large = leave(tmp_path, "large", BUDGET, "0b" * 32)
    with caplog.at_level(logging.WARNING, "afterglow.store"):
        thread = neighbours.warn(ours, BUDGET)
        thread.join(20)
    (said,) = [record.getMessage() for record in caplog.records if "--disk-cache" in record.getMessage()]
    assert f"{large.name} (1.0 MiB), {small.name}" in said
    assert said.endswith(f"afterglow cache clear {large.name} --cache-dir {tmp_path}")
    assert large.is_dir()
    assert small.is_dir()
    admin.clear(large)
    assert neighbours.excess(ours, BUDGET) is None, "which helps"


def test_a_budget_that_the_file_system_cannot_hold_is_told(ours, caplog):
    free = shutil.disk_usage(ours).free
    with caplog.at_level(logging.WARNING, "afterglow.store"):
        assert neighbours.warn(ours, free // 2) is None
        neighbours.warn(ours, 3 * free).join(20)
    (said,) = [record.getMessage() for record in caplog.records if "--disk-cache" in record.getMessage()]
    assert said.startswith(f"--disk-cache {format_size(3 * free)} is more than the ")
    assert neighbours.lack(ours, 1000, free=0) is None, "what is there already counts as room"
    assert neighbours.lack(ours, BUDGET, free=0)


def test_another_server_has_a_budget_of_its_own(ours, tmp_path):
    other = leave(tmp_path, "other", BUDGET, "0c" * 32)
    assert neighbours.excess(ours, BUDGET)
    with Namespace.open(tmp_path, "other", "0c" * 32, ODD):
        assert neighbours.excess(ours, BUDGET) is None
    assert other.is_dir()


def test_the_same_model_in_another_number_format_is_another_cache(tmp_path):
    with Kit(tmp_path) as kit:
        assert kit.namespace.description.layout == ALIGNED
        leave(tmp_path, "m", BUDGET, "0d" * 32)
        assert "m-0d0d" in neighbours.excess(kit.path, BUDGET)
