"""From an engine's tensors to a `KVLayout`: the position of each page on the device and in a chunk image.

A chunk image is the serialized KV of one chunk.

model.py     PageRef, KVGroup, KVLayout: the layout itself and its chunk image; pages that share bytes; the interface
             of a tensor, without torch
builders.py  layouts from rows, from named axes, and from an attention back end that reports its cache's shape
"""

from longshore.layout.builders import (
    AttentionBackend,
    axes_of_backend,
    from_axes,
    from_backend,
    from_rows,
    group_from_axes,
)
from longshore.layout.model import DeviceTensor, KVGroup, KVLayout, PageRef, RefTable

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
