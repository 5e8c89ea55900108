"""`Trust`: whether blocks on the device are what their keys say, after weights or adapters have changed.

vLLM keeps blocks on the device when weights change, unless it is told to reset its prefix cache. What it offers from
there could be of the old weights, so nothing is stored from the change on until the device is known to be empty.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

from vllm.v1.kv_offload.base import OffloadKey

from longshore.engines.vllm.adapters import Adapters
from longshore.engines.vllm.requests import Request, Ticket
from longshore.runtime.stamps import Stamps

_log = logging.getLogger(__name__)


class Trust:
    """Of one manager.

    Attributes:
        weight_changes: How often the workers' weights had changed at the last look, of all ranks.
    """

    def __init__(self, stamps: Stamps, *, base_is_mixed: bool) -> None:
        """`base_is_mixed` says that blocks of the base model may have been computed with an adapter."""
        self.weight_changes = stamps.weight_changes
        self._stamps = stamps
        self._adapters = Adapters(stamps)
        self._base_is_mixed = base_is_mixed
        self._device_used = False
        """Whether there were lookups, or stores, since the device was last known to be empty."""
        self._distrusts = False
        """Whether the device may have blocks of other weights than those in force."""

    def weights_are_new(self) -> bool:
        """Whether weights have changed since the last look; if so, all that is stored means nothing any more."""
        changes = self._stamps.weight_changes
        if changes == self.weight_changes:
            return False
        self.weight_changes = changes
        self._distrusts |= self._device_used
        _log.warning(
            "weights changed in the running engine: all tiers were emptied%s",
            "; nothing is stored until the prefix cache is reset (reset_connector=True) while no request is running, "
            "because the device may still have blocks of the old weights"
            if self._distrusts
            else "",
        )
        return True

    def used(self) -> None:
        """The device may have blocks from now on."""
        self._device_used = True

    def device_was_reset(self) -> None:
        """The device has no blocks any more."""
        self._device_used = self._distrusts = False
        self._adapters.device_was_reset()

    def knows(self, request: Request) -> bool:
        """Whether it is known what `request` is computed with, and is the same since it was first known."""
        if request.lora is None:
            return True
        found = self._adapters.identity(request.lora)
        request.adapter = request.adapter or found or b""
        return found is not None and found == request.adapter

    def takes(self, request: Request, keys: Collection[OffloadKey], stores: Iterable[Ticket]) -> bool:
        """Whether blocks of `request` may be stored under `keys`, beside `stores` that are under way."""
        if request.lora is None:
            return not self._distrusts and not self._base_is_mixed
        if self._distrusts or not self.knows(request) or not self._adapters.is_trusted(request.lora):
            return False
        # vLLM ends stores by its own keys, which are the same for all bytes of an adapter: one at a time.
        others = (store for store in stores if store.adapter and store.adapter != request.adapter)
        return not any(key in keys for store in others for key in store.keys)

    def holds(self, store: Ticket) -> bool:
        """Whether what was stored still means what its keys say."""
        if store.lora is None:
            return True
        return self._adapters.is_trusted(store.lora) and self._adapters.identity(store.lora) == store.adapter
