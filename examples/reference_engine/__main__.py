"""Serve a conversation three times: with tiers layer by layer, with tiers as a whole, and without; compare the bits.

python -m examples.reference_engine [--device cuda] [--seed 0]
"""

from __future__ import annotations

import argparse
import os
import sys
import time

# Bits are compared: oneMKL must not pick its kernels by the alignment of its inputs. Read when torch is loaded.
os.environ.setdefault("MKL_CBWR", "COMPATIBLE")

import torch

from examples.reference_engine.connector import Tiers, cache_groups
from examples.reference_engine.engine import Engine, Request, scope_of
from examples.reference_engine.model import Decoder, Shape
from examples.reference_engine.pool import DevicePool
from longshore.config import Config
from longshore.layout import KVLayout
from longshore.runtime.stack import open_stack
from longshore.transfer import CpuDevice, device_for
from longshore.transfer.device.base import Copy, CpuStream, DeviceEvent, Stream
from longshore.transfer.pieces import CopyBatch

ANSWER = 8
SMALL, LARGE = 112, 4096
LINK_SECONDS = 0.003
"""What a copy takes on the CPU at least, so that there is a journey to watch."""


def main() -> int:
    """Print what happened; 1 if a bit differs, or nothing was restored."""
    parser = argparse.ArgumentParser(prog="python -m examples.reference_engine", description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu", help="where the model runs: cpu (the default), cuda, cuda:1, ...")
    parser.add_argument("--seed", type=int, default=0, help="of weights and prompts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(options.device)
    decoder, prompts = Decoder(Shape(), device, options.seed), conversation(options.seed)

    good = True
    for by_layer in (True, False):
        print(f"\nwith tiers, {'layer by layer' if by_layer else 'whole'}; the device holds {SMALL} blocks")
        requests = with_tiers(decoder, prompts, by_layer=by_layer)
        engine = Engine(decoder, DevicePool(decoder.shape, LARGE, device))
        for request, prompt in zip(requests, prompts, strict=True):
            replayed = engine.submit(prompt, ANSWER, request.schedule)
            engine.run()
            good &= same_bits(request, replayed)
        good &= sum(request.hits["tiers"] for request in requests) > 0
        print(f"  bit-equal to the engine without tiers, same schedule: {'yes' if good else 'NO'}")
    return 0 if good else 1


def with_tiers(decoder: Decoder, prompts: list[list[int]], *, by_layer: bool) -> list[Request]:
    """Serve `prompts`, falling asleep once, and say where their tokens came from."""
    pool = DevicePool(decoder.shape, SMALL, decoder.device)
    link = SlowLink() if decoder.device.type == "cpu" else device_for(pool.layout)
    compute = torch.accelerator.current_stream() if decoder.device.type != "cpu" else None
    groups, scope = cache_groups(decoder.shape), scope_of(decoder, pool)
    with open_stack(Config.make(host_size="64MiB"), pool.layout, scope, link, groups=groups, partial=True) as stack:
        tiers = Tiers(stack, pool, compute, by_layer=by_layer)
        engine = Engine(decoder, pool, tiers)
        requests = []
        print("  prompt   device  tiers  copied  computed   first token")
        for turn, prompt in enumerate(prompts):
            if turn == len(prompts) // 2:
                engine.sleep()
                engine.wake_up()
                print("  -- slept: the device's memory was freed, and taken back --")
            requests.append(engine.submit(prompt, ANSWER))
            begun = time.perf_counter()
            engine.step()
            seconds = time.perf_counter() - begun
            engine.run()
            hits = requests[-1].hits
            computed = len(prompt) - sum(hits.values())
            print(
                f"  {len(prompt):>6} {hits['device']:>8} {hits['tiers']:>6} {hits['copied']:>7} {computed:>9}"
                f" {seconds * 1e3:>10.1f} ms"
            )
        stack.runtime.flush(timeout=10.0)
        with stack.runtime.locked() as cache:
            moved = {route: totals.chunks for route, totals in cache.counters.routes.items()}
    print(f"  blocks moved: {', '.join(f'{count} {route}' for route, count in moved.items())}")
    print(f"  layers computed while later ones were travelling: {tiers.overlapped}")
    return requests


def conversation(seed: int) -> list[list[int]]:
    """Four users over one system prompt, each of whom asks twice, in turn; every second one parts within a block."""
    random = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        drawn: list[int] = torch.randint(0, 256, (count,), generator=random).tolist()
        return drawn

    system, users = tokens(100), [tokens(100 + 7 * user) for user in range(4)]
    first = [system[: 100 - user % 2 * 9] + said for user, said in enumerate(users)]
    return first + [said + tokens(40) for said in first]


def same_bits(one: Request, other: Request) -> bool:
    """Whether all logits of both are the same, bit for bit."""
    pairs = zip(one.logits, other.logits, strict=True)
    return one.tokens == other.tokens and all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in pairs)


class SlowLink(CpuDevice):
    """The CPU's copies, each of which takes a while."""

    def stream(self, layout: KVLayout, destination: str) -> Stream:
        """A stream that dawdles."""
        return _SlowStream()


class _SlowStream(CpuStream):
    def copy(self, batch: CopyBatch, after: tuple[DeviceEvent, ...]) -> Copy:
        """Sleep, then copy."""
        time.sleep(LINK_SECONDS)
        return super().copy(batch, after)


if __name__ == "__main__":
    sys.exit(main())
