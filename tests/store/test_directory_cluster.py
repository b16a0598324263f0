"""A directory on a cluster (real Redis servers): all its names are on one node, which is found from any other."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from afterglow.store.shared import directory
from afterglow.store.shared.ledger import Ledger
from afterglow.store.shared.remote import Remote
from tests.store.redis_server import RedisServer
from tests.store.test_directory import MODEL, ONE, TWO, Side, named_bucket
from tests.waiting import wait_for

SLOTS = 16_384


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[RedisServer]]:
    """Two nodes that know each other and ask for a password. The second one has all slots."""
    found = [RedisServer(tmp_path, "secret", cluster=True) for _ in range(2)]
    try:
        empty, full = (each.client for each in found)
        full.execute_command("CLUSTER ADDSLOTS", *range(SLOTS))
        empty.execute_command("CLUSTER MEET", "127.0.0.1", found[1].port)
        wait_for(lambda: all(_known(each) == ("ok", "2") for each in found), 30)
        yield found
    finally:
        for each in found:
            each.kill()


def _known(node: RedisServer) -> tuple[str, str]:
    """The state of the cluster, and the number of its nodes, as one of them knows it."""
    with node.client as client:
        facts = client.execute_command("CLUSTER INFO")
    return facts["cluster_state"], facts["cluster_known_nodes"]


@pytest.fixture
def side(nodes: list[RedisServer], monkeypatch: pytest.MonkeyPatch) -> Iterator[Side]:
    """One server's view of a bucket, by the address of the node that has no slots."""
    monkeypatch.setattr(directory, "CALL_S", 5.0)
    monkeypatch.setattr(directory, "LATE_S", 50.0)
    monkeypatch.setattr(directory, "REST_S", 0.05)
    found = Side(named_bucket(), nodes[0].url)
    yield found
    found.objects.close()


def test_a_cluster_is_a_directory_by_the_address_of_any_node(nodes: list[RedisServer], side: Side) -> None:
    side.bucket.put(ONE.path, ONE.data)
    side.know_all()
    assert side.find() == {"3": 128}, "it was copied"
    side.put(TWO)
    assert side.find() == {"3": 128, "4": 192}
    side.objects.delete(ONE.path)
    assert side.find() == {"4": 192}
    remote = Remote(lambda: side.objects)
    remote.call("opening the store", lambda objects: [*objects.list(MODEL)], 5)
    ledger = Ledger(remote, MODEL)
    assert ledger.lead()
    ledger.wrote(100)
    tally = ledger.read()
    assert tally is not None
    assert tally.written == 100
    ledger.follow()
    with nodes[1].client as client:
        slots = {client.execute_command("CLUSTER KEYSLOT", key) for key in client.scan_iter()}
    assert len(slots) == 1
    assert side.failures == 0


@pytest.mark.long
def test_where_a_cluster_s_node_dies_the_url_s_own_is_asked_again(nodes: list[RedisServer], side: Side) -> None:
    home, full = nodes
    side.know_all()
    side.put(ONE)
    with full.client as client:
        name = client.execute_command("CLUSTER MYID")
    full.kill()
    assert side.find() is None
    assert side.failures == 1
    with home.client as client:  # it takes the place of the one that is dead
        client.execute_command("CLUSTER FORGET", name)
        client.execute_command("CLUSTER ADDSLOTS", *range(SLOTS))
    wait_for(lambda: _known(home) == ("ok", "1"), 30)
    time.sleep(0.06)
    side.know_all()
    assert side.find() == {"3": 128}, "copied from the store anew"
