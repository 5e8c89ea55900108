"""`longshore ctl` to a vLLM engine: the commands of its operator, also while it serves and sleeps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from engine_runs import CONNECTOR, Answers, Serve, prompts, tiers


def test_an_operator_looks_pins_and_clears_in_a_running_engine(
    serve: Serve, oracles: Callable[[str], Answers], tmp_path: Path
) -> None:
    asked = prompts()
    first, whole = asked[0], len(asked[0]) // 32
    socket = tmp_path / "engine.ctl"
    steps = [
        ["ask", first], ["settle"],
        ["ctl", "lookup", first], ["ctl", "lookup", asked[1]], ["ctl", "pin", first], ["ctl", "stats"],
        ["reset"], ["ask", first],
        ["sleep", 1], ["ctl", "lookup", first], ["wake"],
        ["ctl", "clear"], ["ctl", "lookup", first], ["reset"], ["ask", first],
        ["ctl_while_asking", asked],
    ]  # fmt: skip
    served = serve("llama", steps, {**tiers(tmp_path / "kv"), "control": str(socket)}, 160, connector=CONNECTOR)
    asked_once, there, absent, pinned, stats, again, asleep, cleared, gone, computed, together = served.answers
    assert there == {"chunks": whole, "leading": whole, "runs": [{"tier": "host", "chunks": whole}]}
    assert (absent["leading"], pinned) == (0, {"chunks": whole, "pinned": whole})
    assert stats["pinned_chunks"] == whole
    assert stats["metrics"]["longshore_used_bytes"]
    assert (again["cached"], asleep["leading"]) == (whole * 32, whole)
    assert cleared["dropped"]["host"] >= whole <= cleared["dropped"]["file"]
    assert (gone["leading"], computed["cached"]) == (0, 0)
    oracle = oracles("llama")
    for answer in (asked_once, again, computed):
        assert answer["tokens"] == oracle[0]["tokens"]
    assert [len(answer["tokens"]) for answer in together] == [6, 6, 6]
    assert served.counters["faults"] == 0
    assert not socket.exists()


@pytest.mark.parametrize("model", ["gemma", "qwen"])
def test_commands_concern_all_groups_of_an_engine(
    model: str, serve: Serve, oracles: Callable[[str], Answers], tmp_path: Path
) -> None:
    """Sliding windows, and recurrent states, beside full attention."""
    first, *others = prompts()
    steps = [
        ["ask", first], ["settle"], ["ctl", "lookup", first], ["ctl", "pin", first], ["ctl", "lookup", others[0]],
        *(["ask", each] for each in others), ["settle"], ["evict_all"], ["ctl", "lookup", first],
        ["reset"], ["ask", first], ["ctl", "unpin"], ["ctl", "clear"], ["ctl", "lookup", first],
        ["reset"], ["ask", first],
    ]  # fmt: skip
    extra = {**tiers(tmp_path / "kv"), "control": str(tmp_path / "engine.ctl")}
    served = serve(model, steps, extra, 160, connector=CONNECTOR)
    asked, there, pinned, absent, _, _, left, again, unpinned, cleared, gone, computed = served.answers
    assert len(there["groups"]) > 1
    assert there["leading_tokens"] == left["leading_tokens"] == again["cached"] > 0
    assert (absent["leading_tokens"], gone["leading_tokens"], computed["cached"]) == (0, 0, 0)
    assert 0 < pinned["pinned"] == unpinned["unpinned"] <= pinned["chunks"]
    assert sum(run["chunks"] for run in there["groups"][0]["runs"]) > 0
    assert all(count for count in cleared["dropped"].values())
    assert asked["tokens"] == again["tokens"] == computed["tokens"] == oracles(model)[0]["tokens"]
    assert served.counters["faults"] == 0
