"""The table of metrics: exporter, reference page, Grafana board and alert rules are made from it.

Names do not change between releases without a line in CHANGELOG.md. This module imports nothing of Longshore.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import NamedTuple


class MetricKind(enum.Enum):
    """The Prometheus type of a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Metric(NamedTuple):
    """One metric.

    Attributes:
        kind: Its type.
        help: Help text.
        labels: Label names.
        buckets: Upper bounds of the buckets of a histogram, without infinity.
        vllm: Whether vLLM's own `/metrics` has it.
        group: Heading on the reference page, and row of the Grafana board.
    """

    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    vllm: bool = False
    group: str = ""


LOAD_SECONDS = "longshore_load_seconds"
LOOKUP_SECONDS = "longshore_lookup_seconds"
EVICTED_AGE_SECONDS = "longshore_evicted_age_seconds"
QUEUE_SECONDS = "longshore_transfer_queue_seconds"
TRANSFER_SIZE_BYTES = "longshore_transfer_size_bytes"

_LATENCIES = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_SHORT = (0.000005, 0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25)
_AGES = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 43200.0, 86400.0, 604800.0)
_SIZES = tuple(float(1 << power) for power in range(14, 33, 2))


def _counter(help: str, *labels: str, vllm: bool = False) -> Metric:  # noqa: A002 - as prometheus_client names it
    return Metric(MetricKind.COUNTER, help, labels, vllm=vllm)


def _gauge(help: str, *labels: str, vllm: bool = False) -> Metric:  # noqa: A002
    return Metric(MetricKind.GAUGE, help, labels, vllm=vllm)


def _histogram(help: str, buckets: tuple[float, ...], *labels: str, vllm: bool = False) -> Metric:  # noqa: A002
    return Metric(MetricKind.HISTOGRAM, help, labels, buckets, vllm)


GROUPS: Mapping[str, Mapping[str, Metric]] = {
    "Hits and misses": {
        "longshore_requests": _counter("Requests looked up by an engine, each counted once"),
        "longshore_lookup_attempts": _counter("Lookups of requests, including repeated ones while a request waits"),
        "longshore_hit_chunks": _counter("Chunks loaded, by the tier they were read from", "tier", vllm=True),
        "longshore_hit_tokens": _counter(
            "Tokens of the chunks loaded, of the first KV cache group, by the tier they were read from",
            "tier",
            vllm=True,
        ),
        "longshore_miss_chunks": _counter("Chunks looked up and not loaded, by reason", "reason", vllm=True),
        "longshore_recomputed_chunks": _counter("Chunks found, but recomputed because that is faster", vllm=True),
        "longshore_probed_chunks": _counter(
            "Chunks that remote stores were asked for, by answer", "tier", "answer", vllm=True
        ),
    },
    "Latency": {
        LOAD_SECONDS: _histogram(
            "Seconds from the order of a load until its chunks are on the device, by the slowest tier that it read",
            _LATENCIES,
            "tier",
        ),
        LOOKUP_SECONDS: _histogram("Seconds that a lookup of a request took in the control plane", _SHORT, vllm=True),
        QUEUE_SECONDS: _histogram(
            "Seconds between the submission of a transfer and its first byte", _LATENCIES, "route", vllm=True
        ),
        TRANSFER_SIZE_BYTES: _histogram("Bytes of one transfer, by each rank", _SIZES, "route", vllm=True),
        "longshore_block_reuse_waits": _counter(
            "Times that the engine waited for copies of device blocks before it reused them"
        ),
        "longshore_block_reuse_wait_seconds": _counter("Seconds that the engine waited for copies of device blocks"),
        "longshore_block_reuse_timeouts": _counter("Device blocks that were not reused, as copies did not end in time"),
    },
    "Transfers": {
        "longshore_moved_bytes": _counter("Bytes transferred", "route", vllm=True),
        "longshore_moving_seconds": _counter("Seconds spent transferring", "route", vllm=True),
        "longshore_failed_chunks": _counter("Chunks whose transfer failed", "route", vllm=True),
        "longshore_refused_transfers": _counter("Transfers refused because a queue was full"),
        "longshore_jobs_in_flight": _gauge("Transfer jobs in flight"),
        "longshore_queued_transfers": _gauge("Transfers waiting in a queue", "destination", "class"),
        "longshore_device_fallbacks": _counter("Copies of the device that used a slower fallback, by reason", "reason"),
    },
    "Tiers": {
        "longshore_used_bytes": _gauge("Bytes used in a tier, including transfers in flight", "tier", vllm=True),
        "longshore_capacity_bytes": _gauge("Size of a tier in bytes", "tier", vllm=True),
        "longshore_tier_available": _gauge("1 if a tier serves reads and writes, else 0", "tier", vllm=True),
        "longshore_leases": _gauge("Lookups whose chunks are kept from eviction until they are released"),
        "longshore_evicted_chunks": _counter("Chunks evicted from a tier", "tier", vllm=True),
        "longshore_demoted_chunks": _counter("Chunks evicted from a tier while a colder tier had a copy", "tier"),
        EVICTED_AGE_SECONDS: _histogram(
            "Age of chunks at their eviction, since they were written to the tier by this process",
            _AGES,
            "tier",
            vllm=True,
        ),
        "longshore_dropped_chunks": _counter(
            "Chunks offered to a tier and not stored, by reason", "tier", "reason", vllm=True
        ),
        "longshore_lost_chunks": _counter(
            "Chunks in a tier that could not be read, or were damaged", "tier", vllm=True
        ),
    },
    "Peers": {
        "longshore_peer_values": _counter(
            "Values that peers asked this engine for, by request and answer", "request", "answer", vllm=True
        ),
        "longshore_peer_sent_bytes": _counter("Bytes of values sent to peers, headers included", vllm=True),
        "longshore_peer_dropped_clients": _counter(
            "Connections of peers that were refused or dropped, by reason", "reason", vllm=True
        ),
        "longshore_peer_waits": _counter(
            "Requests of this engine that waited for blocks which a peer was computing, by outcome",
            "outcome",
            vllm=True,
        ),
    },
    "Failures": {
        "longshore_control_plane_faults": _counter(
            "Failures of the control plane; the first one disables all tiers", vllm=True
        ),
        "longshore_internal_errors": _counter(
            "Transfers, with those that waited for them, and reports of metrics that failed because of a bug of "
            "Longshore; the log has the traceback",
            vllm=True,
        ),
        "longshore_file_failures": _counter("Failures in the file tier, by reason", "reason", vllm=True),
        "longshore_file_fallbacks": _counter(
            "Operations of the file tier that used a slower fallback, by reason", "reason"
        ),
        "longshore_store_failures": _counter(
            "Failures of a remote store: of probes, reads and writes, by reason", "tier", "reason", vllm=True
        ),
        "longshore_weight_changes": _counter(
            "Times that the weights of a rank changed in the running engine, which discards all blocks", vllm=True
        ),
    },
    "Process": {
        "longshore_build_info": _gauge("1, with the version of Longshore as a label", "version", vllm=True),
        "longshore_arena_bytes": _gauge("Bytes of the host arena, the memory of the host tier"),
        "longshore_arena_huge_bytes": _gauge("Bytes of the host arena on huge pages, at start"),
        "longshore_arena_registered_bytes": _gauge("Bytes of the host arena registered with the device (pinned)"),
        "longshore_arena_registered_pieces": _gauge("Registered pieces of the host arena"),
        "longshore_arena_numa_bound": _gauge("Whether the host arena is bound to a NUMA node"),
        "longshore_arena_shared": _gauge("Whether other processes can attach to the host arena"),
        "longshore_arena_fallbacks": _counter("Fallbacks of the host arena, by reason", "reason"),
        "longshore_events_written": _counter("Events written to the event file"),
        "longshore_events_missed": _counter("Events missing from the event file"),
        "longshore_events_off": _gauge("Whether event recording has stopped because the file could not be written"),
    },
}
"""The metrics by group. Prometheus appends `_total` to the name of a counter."""

METRICS: Mapping[str, Metric] = {
    name: metric._replace(group=group) for group, metrics in GROUPS.items() for name, metric in metrics.items()
}
"""Every metric, by name."""

VALUES: Mapping[tuple[str, str], Mapping[str, str]] = {
    ("longshore_miss_chunks", "reason"): {
        "absent": "no tier has it",
        "remote": "only a remote store is known to have it, and it was not fetched",
        "in_flight": "being written to its first tier",
        "no_room": "host memory had no room to read it into",
        "after_miss": "in a tier, but after a chunk of the same prompt that missed",
        "corrupt": "its checksum did not match",
        "mismatch": "its slot has a valid record of another key, scope or generation",
        "short": "its record was shorter than the image",
        "io_error": "reading it failed in the operating system or a store",
        "device_error": "copying it to the device failed; the tier keeps it",
        "internal_error": "a bug of Longshore ended the transfer, see the log; the tier keeps it",
        "no_space": "a medium was full",
        "deadline": "the load timed out (`load_timeout`)",
        "cancelled": "the request or a reset cancelled the load",
        "tier_off": "the tier was closed or disabled",
        "unavailable": "no tier host ran, its disk was stalled, or the circuit breaker of a store was open",
        "not_found": "a remote store did not have it, or not any more",
        "queue_full": "a bounded queue was full",
    },
    ("longshore_dropped_chunks", "reason"): {
        "no_room": "nothing in the tier can be evicted for it, or what can has more expected hits",
        "backpressure": "too many writes are in flight (`max_writes`), or no slot became free in time",
        "no_parent": "no tier has the chunk before it, and no slot was free",
        "write_failed": "the copy was attempted and did not succeed",
        "cancelled": "a reset, a change of weights, a sleep or the engine cancelled the copy",
        "below_threshold": "offered to host memory less often than `threshold`",
        "generated": "part of the answer, with the setting `prompt_only`",
        "priority": "of a priority below `priority_floor`",
        "admission": "fewer expected hits than the chunk to evict for it (`admission`)",
        "rate_limit": "more bytes than `file_daily_writes` allows",
        "tier_off": "the tier is disabled or read-only",
    },
    ("longshore_probed_chunks", "answer"): {
        "present": "the store has it",
        "absent": "the store lacks it",
        "no_answer": "no answer before the timeout, or not from all ranks",
        "not_sent": "not asked: too many questions are in flight",
    },
    ("longshore_device_fallbacks", "reason"): {
        "new_event": "more events were in use than allocated at start",
        "unpinned_stage": "no pinned memory for staging: pageable memory is used",
        "no_batched_copy": "the driver has no batched copy",
        "host_unregistered": "images outside registered memory: copied through pinned staging memory",
        "late_bounce": "that staging memory was allocated in the middle of a copy",
        "straddling_piece": "adjacent images are in different registrations",
        "smaller_ring": "device memory for staging was allocated with half or a quarter of its size",
        "no_ring": "no device memory for staging",
        "descriptors_grown": "more kernel arguments than memory was allocated for",
        "no_kernels": "kernels cannot be compiled (see the log): pages are copied one by one",
    },
    ("longshore_file_failures", "reason"): {
        "read_corrupt": "the checksum of a record did not match",
        "read_mismatch": "a slot had a valid record of another key, scope or generation, or none",
        "read_short": "the file ended within a record",
        "read_io_error": "the operating system reported an error for a read",
        "read_device_error": "with GPUDirect Storage: the device failed while a record was read",
        "write_io_error": "the operating system reported an error for a write",
        "write_no_space": "the disk or a quota is full",
        "write_device_error": "with GPUDirect Storage: the device failed while a record was written",
        "read_only": "1 after 8 failed writes in a row, until the restart: reads go on",
        "off": "1 after 8 failed reads in a row, until the restart: neither reads nor writes",
        "checkpoint": "the index could not be written; a restart may recover fewer records",
        "tier_host": "a tier host process died or could not be started",
        "stalled": "the disk ended no operation for 10 s",
    },
    ("longshore_file_fallbacks", "reason"): {
        "no_direct_io": "1 if I/O goes through the page cache",
        "no_queue": "1 if a thread pool is used instead of asynchronous I/O",
        "no_gds": "cuFile cannot be used: the image went through host memory",
        "gds_write": "cuFile refused to write an image: it went through host memory",
        "gds_read": "cuFile refused to read an image: it went through host memory",
        "unaligned": "an image that begins or ends within a page: it went through host memory",
        "host_checksum": "a record whose checksum devices cannot compute: it went through host memory",
    },
    ("longshore_store_failures", "reason"): {
        "connection": "no connection could be made, or it was lost",
        "timeout": "no answer by a deadline",
        "refused": "the server answered with an error, such as a wrong password",
        "broken": "an invalid reply",
        "breaker": "the circuit breaker opened: requests end at once until the server answers again",
        "full": "a write that the store had no room for",
        "budget": "a write beyond `daily_writes`",
        "denied": "S3: wrong credentials, or no permission",
        "clock": "S3: the clocks of this machine and of the server differ",
        "throttled": "S3: too many requests",
        "server": "S3: a status of 500 or more",
        "tier_host": "a tier host process died or could not be started",
    },
    ("longshore_arena_fallbacks", "reason"): {
        "numa_unknown": "the NUMA node of the device is unknown: memory on any node",
        "numa_refused": "the system refused to bind the memory to the node",
        "numa_strays": "the node had too little memory: some pages are on another node",
        "numa_unverified": "the memory is bound, but the system does not report where its pages are",
        "huge_pages": "only part of the memory is on huge pages",
        "populate": "pages could not be allocated ahead: touched one by one, or allocated at their first use",
        "registration": "the device refused to register (pin) a piece: its copies use a staging buffer",
    },
    ("longshore_peer_values", "request"): {
        "probe": "whether it is there (`STRLEN`)",
        "read": "the value itself (`GET`)",
    },
    ("longshore_peer_values", "answer"): {
        "present": "it is in host memory or in files; of a read, it was sent",
        "absent": "no tier has it",
        "coming": "it is being computed or stored; a read never answers this",
    },
    ("longshore_peer_dropped_clients", "reason"): {
        "limit": "64 clients were connected, no thread could be started, or the engine was closing",
        "tls": "no TLS connection could be made, as with a client without TLS or without a valid certificate",
        "password": "it gave a wrong password",
        "credentials": "`password_file` of `serve` could not be read",
        "late": "it did not log in, ask, or take an answer in time",
        "invalid": "it sent something that is no command",
        "sleep": "host memory, which it was reading, is freed while the engine sleeps",
    },
    ("longshore_peer_waits", "outcome"): {
        "arrived": "the peer had them in time",
        "gone": "the peer had nothing any more: the prefill was aborted, or the peer died",
        "late": "`load_timeout` passed",
    },
}
"""What the values of labels mean, where they are reasons."""
