"""Which replica of Ray Serve a stream goes to. Only Ray Serve imports this file."""

import hashlib
from typing import Any

from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica


class StickyRouter(ConsistentHashRouter):
    """Sends a stream to the replica that has it as long as that lives, and otherwise where its name hashes to.

    Ray's own router hashes each request anew, so streams would move whenever a replica comes, and those of a lost
    replica would wait until Ray Serve has noticed the loss.
    """

    def __init__(self, *arguments: Any, **keywords: Any):
        super().__init__(*arguments, **keywords)
        self._owners: dict[str, ReplicaID] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the one replica of the request's stream, which Ray Serve calls its session."""
        ranks = await super().choose_replicas(candidate_replicas, pending_request)
        name = pending_request.metadata.session_id if pending_request else ""
        if not name or not candidate_replicas:
            return ranks
        living = {replica.replica_id: replica for replica in candidate_replicas}
        if self._owners.get(name) not in living:
            self._owners[name] = max(living, key=lambda replica: weight(name, replica.unique_id))
        return [[living[self._owners[name]]]]


def weight(name: str, replica: str) -> bytes:
    """Return what a stream's replica has most of: rendezvous hashing, so that other streams stay when one goes."""
    return hashlib.sha256(f"{replica} {name}".encode()).digest()
