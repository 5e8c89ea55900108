"""Longshore: moves the KV cache of LLM inference between device memory and slower tiers.

    longshore.cache      control plane: what is where, what moves, what is evicted (sans I/O)
    longshore.transfer   data plane at the device's edge
    longshore.tiers      data plane below it: host memory, files
    longshore.runtime    the loop between them
    longshore.engines    thin adapters: Hugging Face transformers, ...

`import longshore` is cheap: no torch, no engine.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("longshore-kv")
except PackageNotFoundError:  # a source tree that was not installed
    __version__ = "0+unknown"

__all__ = ["__version__"]
