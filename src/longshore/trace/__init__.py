"""Request traces: readers, replay, sizing, synthetic workloads. Nothing here imports torch."""

from longshore.trace.mooncake import TRACE_BLOCK_TOKENS, parse_mooncake, read_excerpt, read_mooncake
from longshore.trace.readers import Form, form_of, read_trace
from longshore.trace.request import TraceRequest
from longshore.trace.synthetic import FAMILIES, synthesize
from longshore.trace.tokens import tokens_of
from longshore.trace.workload import Workload, WorkloadRequest

__all__ = [
    "FAMILIES",
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
    "synthesize",
    "tokens_of",
]
