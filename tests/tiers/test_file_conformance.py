"""The conformance suite on the file tier, with and without direct I/O."""

import errno
from collections.abc import Sequence
from pathlib import Path

from longshore.testing import TierTests
from longshore.tiers.arena import Arena
from longshore.tiers.base import Tier
from longshore.tiers.file import FileTier, capacity_for
from plain_io import PlainIo

SCOPE = bytes(range(32))


class TestFileTier(TierTests):
    persistent = True

    def open_tier(self, arena: Arena, directory: Path) -> Tier:
        capacity = capacity_for(self.slots, self.image_bytes)
        return FileTier(directory, capacity=capacity, image_bytes=self.image_bytes, arena=arena, scope=SCOPE)


class NoDirectIo(PlainIo):
    """A file system that refuses the first direct read, as those without direct I/O do."""

    def __init__(self) -> None:
        self.refused = False

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int:
        if not self.refused:
            self.refused = True
            raise OSError(errno.EINVAL, "Invalid argument")
        return super().preadv(fd, buffers, offset)


class TestBufferedFileTier(TierTests):
    persistent = True

    def open_tier(self, arena: Arena, directory: Path) -> Tier:
        capacity = capacity_for(self.slots, self.image_bytes)
        tier = FileTier(
            directory, capacity=capacity, image_bytes=self.image_bytes, arena=arena, scope=SCOPE, io=NoDirectIo()
        )
        assert not tier.direct
        return tier
