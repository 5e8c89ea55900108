"""`KVLayout`: sizes, the image's offsets, the fingerprint, what is refused, and memory that comes and goes."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from longshore.errors import FreedLayoutError, LayoutError
from longshore.layout import KVGroup, KVLayout, PageRef, from_rows


def bytes_of(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8)


def one_group(*refs: PageRef, block_size: int = 4, blocks_per_chunk: int = 1) -> KVGroup:
    return KVGroup("kv", block_size, blocks_per_chunk, refs)


def test_references_follow_one_another_in_the_image() -> None:
    group = one_group(PageRef(0, 0, 656, 656), PageRef(1, 3, 32, 24), PageRef(1, 27, 32, 1), blocks_per_chunk=3)
    layout = KVLayout((group,), [bytes_of(656 * 10), bytes_of(400)], 10)
    assert layout.table(0).image.tolist() == [0, 3 * 656, 3 * 656 + 3 * 24]
    assert group.used_bytes == 3 * (656 + 24 + 1)
    assert group.part_bytes == layout.image_bytes == 4096


def test_each_rank_has_a_part_of_its_own() -> None:
    group = one_group(PageRef(0, 0, 3000, 3000), blocks_per_chunk=2)
    layouts = [KVLayout((group,), [bytes_of(9000)], 3, 4, rank) for rank in range(4)]
    assert [int(layout.table(0).image[0]) for layout in layouts] == [0, 8192, 16384, 24576]
    assert {layout.image_bytes for layout in layouts} == {4 * 8192}
    assert len({layout.fingerprint for layout in layouts}) == 1


def test_the_largest_group_decides_the_slot() -> None:
    groups = [one_group(PageRef(0, 0, 8, 8)), one_group(PageRef(1, 0, 5000, 5000))]
    layout = KVLayout(groups, [bytes_of(80), bytes_of(50000)], 10)
    assert [layout.image_bytes_of(group) for group in range(2)] == [4096, 8192]
    assert layout.image_bytes == 8192


def test_it_prints_itself_as_a_table() -> None:
    layout = from_rows(bytes_of(16 * 96).view(16, 96), pages_per_block=4, block_size=8, blocks_per_chunk=2)
    head, titles, row = str(layout).splitlines()
    assert head.startswith(f"KVLayout {layout.fingerprint[:12]}: 16 blocks on cpu")
    assert titles.split() == ["group", "pool", "tokens", "blocks/chunk", "refs", "bytes/block", "image", "bytes"]
    assert row.split() == ["rows", "0", "8", "2", "4", "96", "4096"]
    layout.free()
    assert "16 blocks freed" in str(layout)


BASE: dict[str, Any] = {
    "pages": [PageRef(0, 0, 24, 24, 6, 0, "a"), PageRef(1, 0, 8, 8, None, 1, "b")],
    "block_size": 4,
    "blocks_per_chunk": 2,
    "ranks": 1,
    "dtype": torch.uint8,
}


def fingerprint(**changes: Any) -> str:
    given = BASE | changes
    tensors = [torch.zeros(960, dtype=given["dtype"]), torch.zeros(320, dtype=given["dtype"])]
    group = KVGroup(given.get("name", "kv"), given["block_size"], given["blocks_per_chunk"], tuple(given["pages"]))
    return KVLayout((group,), tensors, given.get("num_blocks", 10), given["ranks"]).fingerprint


@pytest.mark.parametrize(
    "changes",
    [
        {"blocks_per_chunk": 3},
        {"ranks": 2},
        {"dtype": torch.int8},
        {"block_size": 8, "pages": [BASE["pages"][0]._replace(token_bytes=3), BASE["pages"][1]]},
        {"pages": [BASE["pages"][0]._replace(page_bytes=20, token_bytes=5), BASE["pages"][1]]},
        {"pages": [BASE["pages"][0]._replace(token_bytes=None), BASE["pages"][1]]},
        {"pages": [BASE["pages"][0]._replace(inner="c"), BASE["pages"][1]]},
        {"pages": [BASE["pages"][0], BASE["pages"][1]._replace(layer=2)]},
        {"pages": [BASE["pages"][1]._replace(layer=0), BASE["pages"][0]._replace(layer=1)]},
        {"pages": BASE["pages"][:1]},
    ],
)
def test_whatever_changes_the_image_changes_the_fingerprint(changes: dict[str, Any]) -> None:
    assert fingerprint(**changes) != fingerprint()


@pytest.mark.parametrize(
    "changes",
    [
        {"num_blocks": 5},
        {"name": "other"},
        {"pages": [page._replace(tensor=1 - page.tensor, stride=32) for page in BASE["pages"]]},
        {"pages": [BASE["pages"][0]._replace(offset=7), BASE["pages"][1]]},
    ],
)
def test_where_pages_lie_does_not_change_it(changes: dict[str, Any]) -> None:
    assert fingerprint(**(changes | {"num_blocks": 5})) == fingerprint()


def test_the_fingerprint_is_the_same_in_every_process() -> None:
    assert fingerprint()[:12] == "a7b79d3dde13"


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("num_blocks must be positive", {"num_blocks": 0}),
    ("ranks must be positive", {"ranks": 0}),
    ("rank 2 does not lie in", {"ranks": 2, "rank": 2}),
    ("number of groups must be positive", {"groups": ()}),
    ("number of references of group 'kv' must be positive", {"groups": (one_group(),)}),
    ("block_size of group 'kv' must be positive", {"groups": (one_group(PageRef(0, 0, 8, 8), block_size=0),)}),
    ("blocks_per_chunk of group", {"groups": (one_group(PageRef(0, 0, 8, 8), blocks_per_chunk=-1),)}),
    ("page_bytes must be positive", {"groups": (one_group(PageRef(0, 0, 8, 0)),)}),
    ("offset and stride not negative", {"groups": (one_group(PageRef(0, -1, 8, 8)),)}),
    ("offset and stride not negative", {"groups": (one_group(PageRef(0, 0, -8, 8)),)}),
    ("overlap at a stride of 4", {"groups": (one_group(PageRef(0, 0, 4, 8)),)}),
    ("do not make a page of 8", {"groups": (one_group(PageRef(0, 0, 8, 8, token_bytes=3)),)}),
    ("no tensor 1 among 1", {"groups": (one_group(PageRef(1, 0, 8, 8)),)}),
    ("no tensor -1 among 1", {"groups": (one_group(PageRef(-1, 0, 8, 8)),)}),
    ("10 blocks end 1 bytes after tensor 0", {"groups": (one_group(PageRef(0, 1, 8, 8)),)}),
    ("must not be negative or decrease", {"groups": (one_group(PageRef(0, 0, 8, 1, layer=-1)),)}),
    ("decrease", {"groups": (one_group(PageRef(0, 0, 8, 1, layer=1), PageRef(0, 1, 8, 1, layer=0)),)}),
    ("at least one tensor", {"tensors": []}),
    ("on one device, got cpu, meta", {"tensors": [bytes_of(80), torch.zeros(1, device="meta")]}),
]


@pytest.mark.parametrize(("why", "changes"), REFUSED, ids=[case[0] for case in REFUSED])
def test_what_cannot_be_is_refused(why: str, changes: dict[str, Any]) -> None:
    given = {"groups": (one_group(PageRef(0, 0, 8, 8)),), "tensors": [bytes_of(80)], "num_blocks": 10} | changes
    with pytest.raises(LayoutError, match=why):
        KVLayout(**given)


class Shell:
    """A tensor of a dtype that torch knows but cannot fill."""

    shape = (80,)
    device = "cpu"

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype

    def data_ptr(self) -> int:
        return 4096

    def element_size(self) -> int:
        return 1

    def stride(self) -> tuple[int, ...]:
        return (1,)

    def untyped_storage(self) -> Shell:
        return self

    def nbytes(self) -> int:
        return 80


@pytest.mark.parametrize("dtype", ["torch.int4", "torch.uint1", "torch.quint4x2", "object"])
def test_elements_smaller_than_a_byte_cannot_be_placed(dtype: str) -> None:
    with pytest.raises(LayoutError, match="are not byte-addressable"):
        KVLayout((one_group(PageRef(0, 0, 8, 8)),), [Shell(dtype)], 10)


def test_page_beyond_its_tensor_view_is_refused() -> None:
    whole = bytes_of(160)
    KVLayout((one_group(PageRef(0, 0, 8, 8)),), [whole[80:]], 10)
    with pytest.raises(LayoutError, match="end 8 bytes after"):
        KVLayout((one_group(PageRef(0, 0, 8, 8)),), [whole[88:]], 10)


def test_the_last_page_needs_no_padding_behind_it() -> None:
    KVLayout((one_group(PageRef(0, 0, 32, 8)),), [bytes_of(9 * 32 + 8)], 10)


def test_freed_memory_is_let_go_and_can_be_taken_back() -> None:
    group = one_group(PageRef(0, 0, 8, 8))
    layout = KVLayout((group,), [bytes_of(80)], 10)
    fingerprint, base = layout.fingerprint, int(layout.table(0).base[0])
    assert (layout.generation, layout.freed) == (0, False)

    layout.free()
    layout.free()
    assert (layout.generation, layout.freed) == (1, True)
    with pytest.raises(FreedLayoutError):
        _ = layout.tensors
    with pytest.raises(FreedLayoutError):
        layout.table(0)

    elsewhere = bytes_of(96)
    layout.take_back([elsewhere[16:]])
    assert (layout.generation, layout.freed) == (2, False)
    assert layout.fingerprint == fingerprint
    assert int(layout.table(0).base[0]) == elsewhere.data_ptr() + 16 != base


def test_memory_that_goes_in_between_is_refused_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are planned in other threads than the one that frees."""
    layout = from_rows(torch.zeros(4, 64, dtype=torch.uint8), pages_per_block=2, block_size=4)
    check_live = KVLayout.check_live

    def check_and_free(self: KVLayout) -> None:
        check_live(self)
        self.free()

    monkeypatch.setattr(KVLayout, "check_live", check_and_free)
    assert len(layout.table(0).base) == 2
    layout.free()
    with pytest.raises(FreedLayoutError):
        layout.table(0)


def test_only_tensors_like_those_that_were_freed_are_taken_back() -> None:
    layout = KVLayout((one_group(PageRef(0, 0, 8, 8)),), [bytes_of(80)], 10)
    with pytest.raises(LayoutError, match="still bound to device memory"):
        layout.take_back([bytes_of(80)])
    layout.free()
    for wrong in ([bytes_of(80).view(torch.int16)], [bytes_of(40)], []):
        with pytest.raises(LayoutError):
            layout.take_back(wrong)
        assert (layout.generation, layout.freed) == (1, True)
    layout.take_back([bytes_of(80)])


def test_nothing_here_imports_torch() -> None:
    code = "import sys, longshore.layout; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_memory_that_is_shared_otherwise_is_not_taken_back() -> None:
    """Two groups over one memory share their blocks: jobs and hazards count on it."""
    shared = torch.zeros(64, dtype=torch.uint8)
    groups = [KVGroup(name, 4, 1, (PageRef(index, 0, 16, 16),)) for index, name in enumerate("ab")]
    layout = KVLayout(groups, [shared, shared], 4)
    assert tuple(layout.pools) == (0, 0)
    layout.free()
    with pytest.raises(LayoutError, match="pools"):
        layout.take_back([shared, torch.zeros(64, dtype=torch.uint8)])
    assert layout.freed
    layout.take_back([shared, shared])
