"""The operating system's calls without its queue: a subclass sees each piece as a call."""

from __future__ import annotations

from longshore.tiers.file import SystemIo
from longshore.tiers.file.io import IoQueue


class PlainIo(SystemIo):
    def open_queue(self, fd: int, pieces: int, buffers: int, /) -> IoQueue | None:
        return None
