"""From an engine's tensors to a `KVLayout`: the position of each page on the device and in a block image (model.py)."""

from longshore.layout.model import DeviceTensor, KVGroup, KVLayout, PageRef, RefTable, from_rows

__all__ = ["DeviceTensor", "KVGroup", "KVLayout", "PageRef", "RefTable", "from_rows"]
