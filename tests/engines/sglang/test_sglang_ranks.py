"""Two tensor parallel ranks of a real server: both ask for the same keys, and each is served its own pages."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from sglang_kit import Server, prompt, write_model
from sglang_on_cpu import ONE_SCOPE

TOKENS, SERVED = 400, 384
SEEDS = range(3)


def serve(place: Path, name: str, environment: dict[str, str]) -> Server:
    tier = {"file_path": str(place / "tier"), "file_size": "64MiB"}
    return Server(place / "model", place / f"log-{name}", tp=2, tier=tier, environment=environment)


def swap_ranks(place: Path) -> None:
    """Give each rank the files of the other one."""
    first, second = place / "tier" / "rank-0-of-2", place / "tier" / "rank-1-of-2"
    first.rename(place / "aside")
    second.rename(first)
    (place / "aside").rename(second)


@pytest.mark.parametrize("one_scope", [False, True], ids=["ranks in the scope", "control without"])
def test_each_rank_is_served_its_own_pages(tmp_path: Path, one_scope: bool) -> None:
    write_model(tmp_path / "model")
    environment = {ONE_SCOPE: "1"} if one_scope else {}
    with closing(serve(tmp_path, "first", environment)) as server:
        before = [server.ask(prompt(seed, TOKENS)) for seed in SEEDS]
        server.flush()
        for seed, expected in zip(SEEDS, before, strict=True):
            answer = server.ask(prompt(seed, TOKENS))
            assert (answer.tokens, answer.storage) == (expected.tokens, SERVED)
    swap_ranks(tmp_path)
    with closing(serve(tmp_path, "second", environment)) as server:
        after = [server.ask(prompt(seed, TOKENS)) for seed in SEEDS]
    if one_scope:  # a page of the other rank is taken for its own, and nothing says so
        assert [answer.storage for answer in after] == [SERVED] * len(after)
        assert [answer.tokens for answer in after] != [answer.tokens for answer in before]
    else:
        assert [answer.storage for answer in after] == [0] * len(after)
        assert [answer.tokens for answer in after] == [answer.tokens for answer in before]
