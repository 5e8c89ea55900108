"""Benchmarks that need vLLM: what they report, not how fast it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import save

from longshore.bench import vllm_manager, vllm_sessions
from longshore.errors import BenchError

ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 32,
    "num_gpu_blocks_override": 16,
    "max_model_len": 256,
    "max_num_seqs": 4,
}


def test_the_scheduler_is_timed_beside_vllms_own_manager() -> None:
    cases = list(vllm_manager.run(blocks=[4 * vllm_manager.PROMPT], repeats=1))
    assert [case.name for case in cases] == ["load/8192", "store/8192", "pause/8192"]
    assert all(case.value > 0 and case.reference_value > 0 for case in cases)
    assert {case.reference for case in cases} == {"vLLM's ARC manager"}
    with pytest.raises(BenchError, match="at least"):
        list(vllm_manager.run(blocks=[64]))


def test_sessions_come_back_from_host_memory_and_then_from_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    sizes = {"host_size": "32MiB", "file_size": "32MiB", "settings": {"gate": False}}
    plan = vllm_sessions.Plan(sessions=8, prompt=150, more=20, answer=8, engine=ENGINE, **sizes)  # type: ignore[arg-type]
    cases = {case.name: case for case in vllm_sessions.run(save("llama", tmp_path), tmp_path, plan)}
    times = [f"ttft-{tier}/{share}" for tier in ("host", "file") for share in ("p50", "p95")]
    assert set(cases) == {"zero-reuse", "zero-reuse/cpu", *times, "found-host", "found-file"}
    assert all(cases[name].value > 0 and cases[name].reference_value > 0 for name in times)
    for tier in ("host", "file"):  # whole blocks of what was said before; the device has lost all of it
        assert cases[f"found-{tier}"].value > 0.6
        assert cases[f"found-{tier}"].reference_value == 0


def test_orders_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    for text in ("{", "[]"):
        with pytest.raises(BenchError, match=r"arguments of vllm\.LLM"):
            vllm_sessions.options_of(text)
    assert vllm_sessions.options_of('{"dtype": "float32"}') == {"dtype": "float32"}
    with pytest.raises(BenchError, match=r"without\.log"):
        list(vllm_sessions.run(tmp_path / "nothing", tmp_path, vllm_sessions.Plan(engine={})))
