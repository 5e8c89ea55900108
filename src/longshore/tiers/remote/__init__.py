"""Stores that replicas share, as remote tiers: Valkey, Redis, S3, Mooncake, and a directory that all of them mount.

    tier = open_store("valkey://host:6379/0?ttl=1h", arena=arena, image_bytes=sizes, namespace=digest, generation=7)

    ask(keys, generation, deadline) -> ticket     answers() -> [(ticket, which are there, or None: unknown)]
    submit(operations, deadline)    -> ticket     poll()    -> [TierResult], one for each ticket
    cancel(ticket)    reset(generation, namespace)    set_completion_callback(callback)    close()

`open_store` opens a `RemoteTier`, or a `ClusterTier`, which has one for each node of a cluster.
It is a `KeyedTier` (`longshore.tiers.base`): the slot of each operation is `BY_KEY`, its size class the image size. One
thread submits and polls; nothing but `close` waits. Who drives it polls at least every 20 ms while anything is under
way: `poll` and `answers` end what is late. `set_completion_callback` tells earlier when there is something to collect.

Namespace    Replicas share what they store under one namespace: 32 bytes, a digest of the scope and of what identifies
             the weights. Generations count the resets of one process and are not shared. `reset(generation)` starts a
             random private namespace, because a reset may mean other weights. `reset(generation, namespace)` starts
             the given one; a reset that only empties the cache passes `tier.namespace`. Operations of a later
             generation than the tier knows are refused with `TierError`, those of an earlier one end as `MISMATCH` and
             `CANCELLED`. A new process passes its control plane's generation to the constructor.
Deadlines    An operation *ends* by its deadline, or by the store's own timeout (`RemoteSettings`) if that is earlier.
Statuses     of reads: `OK`; `NOT_FOUND`, not there; `CORRUPT`, `SHORT`, `MISMATCH`, something else is there;
             `DEADLINE`; `UNAVAILABLE`, the breaker is open or the connection was lost; `IO_ERROR`, an error or nonsense
             came.
             of writes: `OK`, also for what was there; `NO_SPACE`, the store is full; `QUEUE_FULL`, beyond the daily
             budget; `DEADLINE`, `UNAVAILABLE`, `IO_ERROR`; `CANCELLED`, of an earlier generation.
Counts       `counts` by operation and status (`("read", "ok")`, `("probe", "present")`), `failures` by reason
             (`FAILURE_REASONS`), `completed`, `is_unavailable`.

A store that cannot be reached raises nothing, also not when it is opened. Invalid URLs raise `ConfigError`. Passwords
come from a file or from the environment, and stand in no message.

    format      the value: header and image               work        images under way; the seam of a store
    settings    the URL                                   resp        Valkey and Redis; stream, their sockets
    breaker     when a server is left alone               directory   a shared directory
    s3          a bucket of S3                            bucket      its access key, and requests about it
    mooncake    Mooncake Store                            mooncake_child   the process of its client
    tier        the tier itself                           cluster     one for each node of a cluster
    peers       one for each replica that requests name
"""

from typing import Any

from longshore.tiers.remote.cluster import ClusterTier
from longshore.tiers.remote.settings import RemoteSettings, parse_url
from longshore.tiers.remote.tier import FAILURE_REASONS, RemoteTier

__all__ = ["FAILURE_REASONS", "ClusterTier", "RemoteSettings", "RemoteTier", "open_store", "parse_url"]


def open_store(url: str | RemoteSettings, **options: Any) -> RemoteTier | ClusterTier:
    """The tier of the store at `url`; `options` and errors are those of `RemoteTier`."""
    settings = parse_url(url) if isinstance(url, str) else url
    return (ClusterTier if settings.is_cluster else RemoteTier)(settings, **options)
