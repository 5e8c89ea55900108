"""The whole state of an object as bytes, to compare before and after; views, which columns are, as what they show."""

from __future__ import annotations

import copyreg
import io
import pickle


def state_of(each: object) -> bytes:
    """Equal for equal states of one object in one process; not to be loaded."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer)
    pickler.dispatch_table = {**copyreg.dispatch_table, memoryview: lambda view: (bytes, (view.tobytes(),))}
    pickler.dump(each)
    return buffer.getvalue()
