"""Many requests at once over a device that is too small for them: what comes back is what was stored, byte for byte.

Batches differ from run to run of such a schedule, so answers prove nothing here: digests of blocks do.
"""

from __future__ import annotations

import os
from typing import Any

from engine_runs import Serve, asked, prompts

SEED = int(os.environ.get("NIGHTLY_SEED", "1"))
REQUESTS = int(os.environ.get("NIGHTLY_REQUESTS", "64"))
WATCHED = {"spec_name": "WatchedSpec", "spec_module_path": "watched_spec", "host_size": "48MiB"}


def test_concurrent_requests_load_the_bytes_that_were_stored(serve: Serve) -> None:
    """Shared beginnings, preemptions, aborts and a reset; then the same once more with flipped bits, as a control."""
    steps = [["crowd", REQUESTS, 8, SEED], ["witness"], ["flip"], ["crowd", 16, 8, SEED], ["witness"]]
    crowd, seen, _, flipped = serve("llama", steps, WATCHED, 50, script="many_requests.py").answers
    assert crowd["ended"] + crowd["aborted"] >= REQUESTS
    assert crowd["aborted"] == REQUESTS // 8
    assert crowd["preempted"] > 0
    assert crowd["was_reset"]
    assert seen["loads"] > 8
    assert seen["wrong"] == 0
    assert seen["open"] == 0
    assert flipped["wrong"] > 0
    assert flipped["open"] == 0


def test_a_crowd_ends_when_the_control_plane_fails(serve: Serve, oracles: Any) -> None:
    steps = [["crowd", REQUESTS, 8, SEED, True], ["witness"], *asked(prompts()[:2])]
    served = serve("llama", steps, WATCHED, 50, script="many_requests.py")
    crowd, seen, *answers = served.answers
    assert served.counters["faults"] == 1, "the damage was met"
    assert crowd["ended"] + crowd["aborted"] >= REQUESTS
    assert seen["loads"] > 0
    assert seen["wrong"] == 0
    assert [each["tokens"] for each in answers] == [each["tokens"] for each in oracles("llama")[:2]]
