"""Test kit: conformance suite; faulty tier, remote tier, faulty network; bit flips on disk; simulated device and disk.

`TierTests` needs pytest, and is loaded when it is first asked for; the rest needs nothing beyond Longshore.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from longshore.testing.disk import flip_header_bit, flip_image_bit
from longshore.testing.faulty import Fault, FaultPlan, FaultyTier, Rule
from longshore.testing.faulty_proxy import FaultyHttpProxy, FaultyProxy, HttpFault, WireFault
from longshore.testing.key_store import KeyStore, StoreFault
from longshore.testing.simulated_device import SimulatedDevice
from longshore.testing.simulation import Simulation, Story, explore, sample
from longshore.testing.tier_harness import TierHarness

if TYPE_CHECKING:
    from longshore.testing.tier_tests import TierTests

__all__ = [
    "Fault",
    "FaultPlan",
    "FaultyHttpProxy",
    "FaultyProxy",
    "FaultyTier",
    "HttpFault",
    "KeyStore",
    "Rule",
    "SimulatedDevice",
    "Simulation",
    "StoreFault",
    "Story",
    "TierHarness",
    "TierTests",
    "WireFault",
    "explore",
    "flip_header_bit",
    "flip_image_bit",
    "sample",
]

_SUITE = "longshore.testing.tier_tests"


def __getattr__(name: str) -> Any:
    if name != "TierTests":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    importlib.import_module("pytest").register_assert_rewrite(_SUITE)  # asserts that fail show their values
    return getattr(importlib.import_module(_SUITE), name)
