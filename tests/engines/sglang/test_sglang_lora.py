"""Real servers with LoRA adapters: SGLang's keys have their names, and the setting `salt` stands for their bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.mem_cache.utils import get_hash_str, storage_namespace_seed
from sglang_kit import CLOSE, PAGE, Answer, Server, check, check_threads, prompt, write_adapter, write_model

TOKENS, SERVED = 400, 384


def server(place: Path, log: str, salt: str) -> Server:
    tier = {"file_path": str(place / "tier"), "file_size": "64MiB", "salt": salt}
    adapters = ["--enable-lora", "--lora-backend", "torch_native", "--lora-paths"]
    adapters += [f"{name}={place / name}" for name in ("one", "other")]
    return Server(place / "model", place / log, tier=tier, extra=adapters)


def test_sglang_keys_hold_an_adapters_name_not_its_bytes() -> None:
    tokens = prompt(0, PAGE)
    ids = [LoRARef.deterministic_id(name, "/adapter") for name in ("one", "one", "other")]
    keys = [get_hash_str(tokens, storage_namespace_seed(each, None)) for each in ids]
    assert keys[0] == keys[1] != keys[2]
    assert keys[0] != get_hash_str(tokens)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("lora")
    write_model(made / "model")
    for seed, name in enumerate(("one", "other")):
        write_adapter(made / name, seed)
    return made


@pytest.fixture(scope="module")
def oracle(place: Path) -> dict[str | None, Answer]:
    """Answers of the model and of its adapters, whose pages are in files then."""
    asked = prompt(0, TOKENS)
    with server(place, "log", "first") as running:
        said = {name: running.ask(asked, lora_path=name) for name in (None, "one", "other")}
        assert [answer.cached for answer in said.values()] == [0, 0, 0]
        assert len({tuple(answer.tokens) for answer in said.values()}) == 3
        for name, expected in said.items():
            assert running.ask_storage(asked, expected, SERVED, lora_path=name).storage == SERVED
        check_threads(running.text())
    write_adapter(place / "one", seed=7)
    return said


def test_pages_of_adapters_are_apart_also_after_a_restart(oracle: dict[str | None, Answer], place: Path) -> None:
    """And the control of the next test: with the same salt, a changed adapter gets pages of the former one."""
    asked = prompt(0, TOKENS)
    with server(place, "log-2", "first") as running:
        for name in (None, "other"):
            answer = running.ask(asked, lora_path=name)
            check(answer, oracle[name])
            assert (answer.storage, answer.cached) == (SERVED, SERVED)
        stale = running.ask(asked, lora_path="one")
        fresh = running.ask(asked, lora_path="one", extra_key="another namespace")
        assert (stale.storage, fresh.cached) == (SERVED, 0)
        assert stale.logprobs != pytest.approx(fresh.logprobs, abs=CLOSE)


def test_with_another_salt_a_changed_adapter_is_computed(oracle: dict[str | None, Answer], place: Path) -> None:
    asked = prompt(0, TOKENS)
    with server(place, "log-3", "second") as running:
        answer = running.ask(asked, lora_path="one")
        fresh = running.ask(asked, lora_path="one", extra_key="another namespace")
    assert (answer.storage, answer.cached, fresh.cached) == (0, 0, 0)
    check(answer, fresh)
    assert answer.tokens != oracle["one"].tokens
