"""From an engine's tensors to a `KVLayout`: the position of each page on the device and in a block image.

model.py     PageRef, KVGroup, KVLayout: the layout itself and its block image
overlap.py   pages that share bytes: refused, or the groups share a pool
tensors.py   the interface of a tensor, without torch
builders.py  layouts from rows, and from named axes
backend.py   layouts from an attention back end that reports its cache's shape
"""

from longshore.layout.backend import AttentionBackend, axes_of_backend, from_backend
from longshore.layout.builders import from_axes, from_rows, group_from_axes
from longshore.layout.model import KVGroup, KVLayout, PageRef, RefTable
from longshore.layout.tensors import DeviceTensor

__all__ = [
    "AttentionBackend",
    "DeviceTensor",
    "KVGroup",
    "KVLayout",
    "PageRef",
    "RefTable",
    "axes_of_backend",
    "from_axes",
    "from_backend",
    "from_rows",
    "group_from_axes",
]
