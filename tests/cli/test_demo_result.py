"""What follows from three runs: equality to the bit, percentiles, the JSON, the table, the page."""

import dataclasses
import io
import json
import math
import struct
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from longshore.cli.demo_report import (
    DemoResult,
    OccupancySample,
    RequestRecord,
    RouteTotal,
    RunRecord,
    demo_page,
    render,
)

NAN = math.nan
OTHER_NAN: float = struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000001))[0]


def request(index: int, ttft: float = 10.0, returning: bool = True, **changes: object) -> RequestRecord:
    record = RequestRecord(
        index=index,
        prompt_tokens=100,
        device_tokens=32,
        host_tokens=16,
        file_tokens=8,
        computed_tokens=44,
        ttft_ms=ttft,
        returning=returning,
        tokens=(5, 6, 7),
        logprobs=(-0.5, -0.25, 0.0),
    )
    return dataclasses.replace(record, **changes)  # type: ignore[arg-type]


def run(name: str, *requests: RequestRecord) -> RunRecord:
    return RunRecord(
        name=name,
        requests=requests,
        occupancy=(OccupancySample(0.5, 0, 1 << 20, 2 << 20, 3 << 20), OccupancySample(1.5, 1, 1 << 20, 0, 0)),
        routes={"host->device": RouteTotal(3_000_000_000, 0.5), "file->host": RouteTotal(0, 0.0)},
        restored_blocks={"host": 7},
        misses={"absent": 4, "corrupt": 0},
        seconds=2.0,
    )


def result(*tiered: RequestRecord, resident: tuple[RequestRecord, ...] | None = None) -> DemoResult:
    return DemoResult(
        setup={"model": "Llama <b>"},
        tiered=run("tiered", *tiered),
        resident=run("resident", *(tiered if resident is None else resident)),
        recompute=run("recompute", *(dataclasses.replace(r, ttft_ms=4 * r.ttft_ms) for r in tiered)),
        capacities={"device": 1 << 20, "host": 4 << 20, "file": 1 << 30},
    )


def test_equal_runs_are_bit_exact() -> None:
    equal = result(request(0, logprobs=(NAN, -0.0, -math.inf)), request(1))
    assert equal.bit_exact
    assert equal.first_difference is None


LOGPROBS = (-0.5, 0.0, NAN)


@pytest.mark.parametrize(
    ("changes", "position"),
    [
        ({"tokens": (5, 6, 8)}, 2),
        ({"logprobs": (-0.5, -0.0, NAN)}, 1),  # equal to ==, another number
        ({"logprobs": (-0.5, 0.0, OTHER_NAN)}, 2),
        ({"logprobs": (math.nextafter(-0.5, 0), 0.0, NAN)}, 0),
        ({"tokens": (9, 6, 7), "logprobs": (-0.5, 1.0, NAN)}, 0),
        ({"tokens": (5, 6), "logprobs": LOGPROBS[:2]}, 2),  # ended early
        ({"tokens": (5, 6, 7, 8), "logprobs": (*LOGPROBS, 0.0)}, 3),
        ({"logprobs": ()}, 0),  # not shown to be equal
    ],
)
def test_any_difference_is_found(changes: dict[str, object], position: int) -> None:
    ours = (request(3), request(4, logprobs=LOGPROBS))
    theirs = (ours[0], dataclasses.replace(ours[1], **changes))  # type: ignore[arg-type]
    for found in (result(*ours, resident=theirs), result(*theirs, resident=ours)):
        assert found.first_difference == (4, position)
        assert not found.bit_exact


def test_tokens_without_logprobs_on_both_sides_are_not_equal() -> None:
    bare = result(request(0, logprobs=()))
    assert bare.first_difference == (0, 0)
    assert not bare.bit_exact


def test_missing_and_mixed_up_requests_are_differences() -> None:
    assert result(request(0), request(1), resident=(request(0),)).first_difference == (1, 0)
    assert result(request(0), resident=(request(0), request(1))).first_difference == (1, 0)
    assert result(request(0), request(1), resident=(request(1), request(0))).first_difference == (0, 0)


def test_runs_that_generated_nothing_are_not_equal() -> None:
    assert not result().bit_exact
    silent = result(request(0, tokens=(), logprobs=()))
    assert silent.first_difference is None
    assert not silent.bit_exact


def test_a_float32_bit_survives_the_comparison() -> None:
    one = np.float32(-1.5)
    two = np.nextafter(one, np.float32(0))
    found = result(
        request(0, logprobs=(float(one),) * 3), resident=(request(0, logprobs=(float(one), float(two), -1.5)),)
    )
    assert found.first_difference == (0, 1)


def test_ttft_counts_returning_requests_only() -> None:
    three = result(request(0, 1000.0, returning=False), request(1, 10.0), request(2, 30.0))
    assert three.tiered.ttft(50) == 20.0
    assert three.recompute.ttft(95) == pytest.approx(116.0)
    assert result(request(0, returning=False)).tiered.ttft(50) is None


def test_json_has_exactly_these_facts() -> None:
    found = result(request(0, 10.0), request(1, 30.0)).as_json()
    assert json.loads(json.dumps(found, allow_nan=False)) == {
        "bit_exact": True,
        "requests": 2,
        "restored_blocks": {"host": 7, "file": 0},
        "fetched_bytes": 0,
        "ttft_ms": {"recompute": {"p50": 80.0, "p95": 116.0}, "tiered": {"p50": 20.0, "p95": 29.0}},
        "tokens": {"device": 64, "host": 32, "file": 16, "computed": 88},
        "routes": {
            "host->device": {"bytes": 3_000_000_000, "gbps": 6.0},
            "file->host": {"bytes": 0, "gbps": 0.0},
        },
        "misses": {"absent": 4, "corrupt": 0},
    }


def shown(found: DemoResult) -> str:
    out = io.StringIO()
    render(found, Console(file=out, width=100, color_system=None))
    return " ".join(out.getvalue().split())


def test_table_shows_the_facts() -> None:
    text = shown(result(request(0, 10.0), request(1, 30.0), request(2, 500.0, returning=False)))
    assert "the 2 returning prompts (of 3)" in text
    assert "p50 80.0 ms 20.0 ms 4.00\u00d7" in text
    assert "p95 116 ms 29.0 ms 4.00\u00d7" in text
    assert "host 48 16.0 % 7" in text
    assert "file 24 8.0 % 0" in text
    assert "host->device 2.8 GiB 6.00" in text
    assert "absent 4" in text
    assert "\u2713 bit-exact All 9 tokens and log-probabilities of 3 requests" in text


def test_verdict_names_the_first_difference() -> None:
    text = shown(result(request(0), request(1), resident=(request(0), request(1, tokens=(5, 0, 7)))))
    assert "\u2717 not equal" in text
    assert "first differ in request 1, at generated token 1: token 6 instead of 0." in text
    assert "bit-exact" not in text


def test_verdict_says_by_how_much_a_logprob_differs() -> None:
    other = float(np.nextafter(np.float32(-0.25), np.float32(-1)))
    found = result(request(0), request(1), resident=(request(0), request(1, logprobs=(-0.5, other, 0.0))))
    text = shown(found)
    assert "first differ in request 1, at generated token 1: the token is the same" in text
    assert f"its log-probability -0.25 instead of {other!r}, a difference of 3.0e-08 (1 in the last place" in text
    assert "In all, 0 tokens and 1 log-probabilities of 6 differ." in text
    assert "difference of inf." in shown(result(request(0), resident=(request(0, logprobs=(-math.inf, -0.25, 0.0)),)))


def test_verdict_of_an_answer_that_is_missing_or_ended_early() -> None:
    for theirs in ((), (request(0, tokens=(5, 6), logprobs=(-0.5, -0.25)),), (request(0, logprobs=()),)):
        assert "one of them has no token with a log-probability there." in shown(result(request(0), resident=theirs))


def test_verdict_warns_of_equality_that_shows_nothing() -> None:
    found = result(request(0))
    idle = dataclasses.replace(found, tiered=dataclasses.replace(found.tiered, restored_blocks={}))
    assert "no block was restored, so the comparison is meaningless" in shown(idle)
    assert "Nothing was generated" in shown(result())


def test_report_is_written_and_holds_the_facts(tmp_path: Path) -> None:
    path = demo_page(result(request(0, 10.0), request(1, 30.0, returning=False))).write(tmp_path / "new" / "index.html")
    assert path == tmp_path / "new" / "index.html"
    source = path.read_text(encoding="utf-8")
    assert source.count('class="plot"') == 3
    assert "host-&gt;device" in source
    assert "Llama &lt;b&gt;" in source
    assert "\u2713 Bit-exact" in source
    assert "<td>host capacity</td><td>4.0\u00a0MiB</td>" in source


def test_report_of_nothing_is_still_a_page() -> None:
    tiered, resident, recompute = (
        RunRecord(name, (), (), {}, {}, {}, 0.0) for name in ("tiered", "resident", "recompute")
    )
    empty = DemoResult({}, tiered, resident, recompute, {})
    source = demo_page(empty).html()
    assert "\u2717 Not equal" in source


def test_figures_of_the_report_show_the_requests() -> None:
    found = result(request(0, 10.0), request(1, 30.0, returning=False))
    source = demo_page(found).html()
    blobs = [
        part.split(">", 1)[1].split("</script>")[0] for part in source.split('<script type="application/json"')[1:]
    ]
    sources, ttft, occupancy = (json.loads(blob) for blob in blobs)
    assert {t["name"]: t["y"] for t in sources["data"]} == {
        "device": [32, 32],
        "host": [16, 16],
        "file": [8, 8],
        "computed": [44, 44],
    }
    points = {t.get("name"): t["y"] for t in ttft["data"]}
    assert points["recompute"] == [40.0]
    assert points["tiered, first request"] == [30.0]
    assert {t["name"]: t["y"] for t in occupancy["data"]} == {"device": [1, 1], "host": [2, 0], "file": [3, 0]}
    assert occupancy["data"][0]["x"] == [0.5, 1.5]


def test_reasons_without_a_miss_are_not_listed() -> None:
    found = result(request(0, 10.0))
    assert "absent" in shown(found)
    assert "corrupt" not in shown(found)
    assert "<td>corrupt</td>" not in demo_page(found).html()
    none = dataclasses.replace(found, tiered=dataclasses.replace(found.tiered, misses={"corrupt": 0}))
    assert "none 0" in shown(none)
