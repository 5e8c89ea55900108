"""Measurements of Longshore's own parts, each beside a reference taken in the same run.

harness.py       Case, Report: what a benchmark says; medians over interleaved repeats
machine.py       what it ran on, and why it must not be a RAM disk
plans.py         ids to addresses                  against a loop over references
copies.py        device pages to images and back   against one memmove of the same bytes
calibration.py   which way of copying is the fastest on a GPU
managers.py      match, offload, evict, memory     against vLLM's CPU manager, or an ordered dictionary
vllm_manager.py  a long prompt in vLLM's scheduler  against vLLM's CPU manager
vllm_sessions.py sessions under vLLM               against the same without Longshore
vllm_trace.py    a trace under vLLM                 against the same without Longshore
vllm_arms.py     these two sides; vllm_engine.py is one of them, in a process of its own
rivals.py        those two, behind one interface
files.py         images to files and back          against fio and plain direct I/O over the same bytes
file_sides.py    who moves them, ours and the others
"""

from longshore.bench.harness import Case, Report, compare
from longshore.bench.machine import machine_facts

__all__ = ["Case", "Report", "compare", "machine_facts"]
