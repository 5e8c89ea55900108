"""Request traces: readers, replay, sizing, workloads. Nothing here imports torch."""

from longshore.trace.parsing import TraceRequest
from longshore.trace.readers import (
    TRACE_BLOCK_TOKENS,
    Form,
    form_of,
    parse_mooncake,
    read_excerpt,
    read_mooncake,
    read_trace,
)
from longshore.trace.workload import Workload, WorkloadRequest, tokens_of

__all__ = [
    "TRACE_BLOCK_TOKENS",
    "Form",
    "TraceRequest",
    "Workload",
    "WorkloadRequest",
    "form_of",
    "parse_mooncake",
    "read_excerpt",
    "read_mooncake",
    "read_trace",
    "tokens_of",
]
