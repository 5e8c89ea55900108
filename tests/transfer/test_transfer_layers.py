"""Layer by layer, in a group that not every layer of the model belongs to."""

from __future__ import annotations

import pytest
import torch
from gated_device import TIMEOUT, GatedDevice
from transfer_kit import Model, Pools, transfer

from longshore.boundary import DEVICE, Section, Status
from longshore.layout import KVGroup, KVLayout, PageRef
from longshore.transfer import H2D, TransferEngine


def hybrid() -> KVLayout:
    """Layers 0 and 2 in one group, 1 and 3 in the other."""
    tensors = [torch.zeros(8 * 24, dtype=torch.uint8) for _ in range(4)]
    groups = [
        KVGroup(name, 4, 1, tuple(PageRef(layer, 0, 24, 24, layer=layer) for layer in layers))
        for name, layers in (("even", (0, 2)), ("odd", (1, 3)))
    ]
    return KVLayout(groups, tensors, 8)


@pytest.mark.parametrize("group", [0, 1])
def test_layers_that_the_group_does_not_have_are_passed(group: int) -> None:
    pools = Pools(hybrid(), slots=4)
    model, device = Model(pools), GatedDevice()
    engine = TransferEngine(pools.layout, device, pools.host)
    sections = [Section(group, 0, (5, 2))]
    device.gates[DEVICE].shut(after=1)
    engine.submit(transfer(1, H2D, sections, [3, 0], by_layer=True))
    assert engine.wait_layer(1, group, TIMEOUT) is Status.OK
    assert engine.wait_layer(1, 2 + group, 0.0) is Status.DEADLINE
    device.gates[DEVICE].open()
    assert [engine.wait_layer(1, layer, TIMEOUT) for layer in range(4)] == [Status.OK] * 4
    assert engine.wait([1], TIMEOUT)
    engine.close()
    assert [result.statuses for result in engine.poll()] == [(Status.OK, Status.OK)]
    model.move(sections, pools.images([3, 0]), destination=DEVICE)
    model.check(pools)
