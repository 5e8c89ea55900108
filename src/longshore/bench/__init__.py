"""Measurements of Longshore's own parts, each beside a reference taken in the same run.

harness.py       Case, Report: what a benchmark says; medians over interleaved repeats; the machine it ran on
plans.py         ids to addresses                  against a loop over references
copies.py        device pages to images and back   against one memmove of the same bytes
calibration.py   which way of copying is the fastest on a GPU
managers.py      match, offload, evict, memory     against vLLM's CPU manager, or an ordered dictionary
cache_sides.py   those two and ours, behind one interface; prompts; memory in a process of its own
vllm_runs.py     sessions or a trace under vLLM    against the same without Longshore
vllm_engine.py   one of these two sides, in a process of its own
files.py         images to files and back          against fio and plain direct I/O over the same bytes
file_sides.py    who moves them, ours and the others
"""

from longshore.bench.harness import Case, Report, compare, machine_facts

__all__ = ["Case", "Report", "compare", "machine_facts"]
