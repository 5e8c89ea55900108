"""An engine of plain rows with a control socket: in this process, or as a process of its own (run as a script)."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from longshore.boundary import Key
from longshore.cache import GroupKeys
from longshore.config import Config
from longshore.keys import Scope, chain
from longshore.layout import from_rows
from longshore.metrics import FollowingCollector
from longshore.runtime.commands import ControlledEngine, ControlledGroup
from longshore.runtime.control import ControlServer, ask
from longshore.runtime.stack import Stack, open_stack
from longshore.transfer import CpuDevice

TOKENS, BLOCKS, TIMEOUT = 16, 8, 60.0


class Engine:
    """Host memory of `slots` chunks, files if there is a `path`, and a socket named `name`."""

    def __init__(self, name: str, slots: int = 16, path: Path | None = None) -> None:
        rows = torch.randint(0, 256, (BLOCKS, 4 * 4096), dtype=torch.uint8)
        self.layout = from_rows(rows, pages_per_block=4, block_size=TOKENS)
        image = self.layout.image_bytes
        more: dict[str, Any] = {} if path is None else {"file_path": path, "file_size": 64 * image}
        config = Config.make(host_size=slots * image, host_huge_pages=False, eviction="lru", gate=False, **more)
        scope = Scope(model="m", weights="w", dtype="d", layout=self.layout.fingerprint, block_size=TOKENS)
        self.stack: Stack = open_stack(config, self.layout, scope, CpuDevice())
        metrics = FollowingCollector()
        metrics.follow(self.stack)
        engine = ControlledEngine(
            lambda: [ControlledGroup(self.stack.runtime)], lambda tokens: [self.keys(tokens)], metrics.collect
        )
        self.server = ControlServer(name, engine)

    def keys(self, tokens: Sequence[int]) -> list[Key]:
        return chain(self.stack.scope.digest, tokens, TOKENS)

    def store(self, tokens: Sequence[int]) -> None:
        """Store all chunks of a prompt, and wait for that."""
        path = GroupKeys(self.keys(tokens))
        with self.stack.runtime.batch() as cache:
            job = cache.store({0: path}, {0: range(len(path.keys))})[0].job
        assert job is None or self.stack.runtime.wait_jobs([job], TIMEOUT)
        assert self.stack.runtime.flush(TIMEOUT)

    def ask(self, command: str, **more: Any) -> dict[str, Any]:
        return ask(self.server.path, {"command": command, **more}, TIMEOUT)

    def leading(self, tokens: Sequence[int]) -> int:
        return int(self.ask("lookup", tokens=list(tokens))["leading"])

    def close(self) -> None:
        self.server.close()
        self.stack.close()


def prompt(number: int, chunks: int = 4) -> list[int]:
    return [number * 1000 + at for at in range(chunks * TOKENS)]


if __name__ == "__main__":
    engine = Engine(sys.argv[1])
    engine.store(prompt(1))
    print("ready", flush=True)
    while True:
        time.sleep(3600)
