"""Engines over a real server of S3: a prefix outlives the process that stored it, and the server's; a tier host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from remotes import IMAGE, PATIENT, PLACES
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from longshore.boundary import Status
from longshore.cli.app import app
from longshore.config import Config
from longshore.engines.transformers import PrefixStore
from longshore.errors import ConfigError, TierError
from longshore.runtime.tier_host import HostedRemoteTier
from longshore.testing import TierHarness
from longshore.testing.local_server import LocalS3
from longshore.testing.tier_harness import span
from longshore.tiers.arena import Arena, ArenaSettings
from longshore.tiers.base import Op
from longshore.tiers.remote import RemoteTier

PROMPT = [int(t) for t in torch.randint(0, 256, (203,), generator=torch.manual_seed(5))]


def engine(remote: str) -> tuple[int, int, list[int]]:
    """One engine's life: tokens of the prompt that it restored, tokens that it then stored, and the next eight."""
    os.environ["MKL_CBWR"] = "COMPATIBLE"
    torch.manual_seed(1)
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    ends = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, **ends)).eval().requires_grad_(requires_grad=False)
    config = Config.make(host_size="4MiB", remote=remote, gate=False, blocks_per_chunk=2, load_timeout=60)
    with PrefixStore(model, config, block_size=16, staging_blocks=8) as store:
        cache, restored = store.restore_prefix(PROMPT[:-1])
        filled = cache if restored else DynamicCache()
        prompt = torch.tensor([PROMPT])
        answer = model.generate(prompt, past_key_values=filled, max_new_tokens=8, do_sample=False)[0].tolist()
        whole = model(prompt, past_key_values=DynamicCache(), use_cache=True).past_key_values
        return restored, store.store_prefix(PROMPT, whole), answer


def lived(url: str) -> list[object]:
    """What `engine` says in a process of its own."""
    run = subprocess.run([sys.executable, __file__, url], check=True, capture_output=True, text=True)
    found: list[object] = json.loads(run.stdout.splitlines()[-1])
    assert "secret-of-admin" not in run.stdout + run.stderr
    return found


def test_a_prefix_outlives_its_engine_and_the_server(tmp_path: Path) -> None:
    with LocalS3("seaweedfs", tmp_path / "server") as server:
        url = server.url(PATIENT)
        restored, stored, answer = lived(url)
        assert (restored, stored) == (0, 192)
        server.kill()
        server.start()
        again = lived(url)
        assert again[0] == 192
        assert again[2] == answer
        elsewhere = lived(server.url(PATIENT, bucket="images/other"))
        assert elsewhere[0] == 0
        assert elsewhere[2] == answer


def hosted(url: str) -> TierHarness:
    arena, namespace = Arena(PLACES * span(IMAGE), ArenaSettings(shared=True)), os.urandom(32)
    return TierHarness(
        lambda: HostedRemoteTier(url, name="remote", image_bytes=IMAGE, arena=arena, namespace=namespace),
        arena,
        by_key=True,
    )


def test_a_tier_host_moves_the_bytes(weed: LocalS3) -> None:
    harness = hosted(weed.url(PATIENT))
    tier = harness.tier
    assert isinstance(tier, HostedRemoteTier)
    for number in range(8):
        harness.store(0, number)
    for number in range(8):
        harness.assert_serves(0, number)
    assert harness.run(harness.op(Op.READ, 0, 9)) == (Status.NOT_FOUND,)
    assert tier.failures == dict.fromkeys(tier.failures, 0)
    tier.close()
    denied = hosted(weed.url(PATIENT, user="reader"))
    assert denied.run(denied.op(Op.WRITE, 0, 1)) == (Status.IO_ERROR,)
    assert denied.tier.failures["denied"] == 1  # type: ignore[attr-defined]
    denied.tier.close()


def test_without_obstore_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "longshore.tiers.remote.s3", raising=False)
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(TierError, match=r"pip install '\.\[s3\]'"):
        RemoteTier("s3://images", arena=Arena(4096), image_bytes=4096, namespace=bytes(32))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_setting_reaches_engines_and_bad_ones_are_refused(engine: str) -> None:
    url = "s3://images/kv?endpoint=http://127.0.0.1:9000&ttl=1d"
    sets = ("--set", "host_size=1MiB", "--no-check")
    good = CliRunner().invoke(app, [f"{engine}-config", "--set", f"remote={url}", *sets], catch_exceptions=False)
    assert (good.exit_code, url in good.output.replace("\\u0026", "&")) == (0, True)
    bad = CliRunner().invoke(app, [f"{engine}-config", "--set", "remote=s3://images?endpoint=h", *sets])
    assert isinstance(bad.exception, ConfigError)
    assert "http://HOST:PORT" in str(bad.exception)


if __name__ == "__main__":
    print(json.dumps(engine(sys.argv[1])))
