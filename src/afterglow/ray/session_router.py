"""Ray Serve's choice of a replica for each request, by the header `X-Session-ID`."""

from __future__ import annotations

from typing import Any

from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter

from afterglow.ray.replica_folder import ranked

PLACE = "place"  # in a replica's metadata


class SessionRouter(ConsistentHashRouter):  # type: ignore[misc]
    """Sends a conversation to the replica that holds its folder.

    Ray's router hashes ids of replicas, and a replica that is started again has another one: its conversations would go
    elsewhere. Here the folder counts. Requests without a session go where Ray's router sends them: evenly to all.
    """

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Order the replicas: those behind the first are for requests that it is too busy for."""
        evenly: list[list[Any]] = await super().choose_replicas(candidate_replicas, pending_request)
        session = pending_request.metadata.session_id if pending_request is not None else ""
        if not session:
            return evenly
        by_place = {replica.replica_metadata.get(PLACE, ""): replica for replica in candidate_replicas}
        return [[by_place[place]] for place in ranked(session, by_place)]
