"""The file tier: preallocated slots on local NVMe, verified at every read."""

from longshore.tiers.file.directory import PendingReset
from longshore.tiers.file.gds import GdsFileTier
from longshore.tiers.file.io import RawIo, SystemIo
from longshore.tiers.file.recovery import capacity_for, capacity_of
from longshore.tiers.file.tier import FAILURE_REASONS, FileTier

__all__ = [
    "FAILURE_REASONS",
    "FileTier",
    "GdsFileTier",
    "PendingReset",
    "RawIo",
    "SystemIo",
    "capacity_for",
    "capacity_of",
]
