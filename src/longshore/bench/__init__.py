"""The cases of `longshore bench`: each measures a part of Longshore beside a reference, in the same run.

harness.py       Case, Report: results of a benchmark; medians over interleaved repeats; the machine it ran on
plans.py         ids to addresses                  against a loop over references
copies.py        device pages to images and back   against one memmove of the same bytes
calibration.py   the fastest way of copying on a GPU
prefills.py      prefill of a model                against one large matrix product
managers.py      match, offload, evict, memory     against vLLM's CPU manager, or an ordered dictionary
cache_sides.py   those two and ours, behind one interface; prompts; memory, measured in a separate process
vllm_runs.py     sessions or a trace under vLLM    against the same without Longshore
vllm_engine.py   one of these two engines, in a process of its own
files.py         images to files and back          against fio and plain direct I/O over the same bytes
"""

from longshore.bench.harness import Case, Report, compare, machine_facts

__all__ = ["Case", "Report", "compare", "machine_facts"]
