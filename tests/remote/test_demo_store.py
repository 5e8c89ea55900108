"""`longshore demo --remote`: an engine that has never seen the prompts restores what another one has stored."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_a_second_engine_is_served_from_the_store(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from longshore.cli.app import main; main()", "demo", "--remote", "--json"]
    options = ["--requests", "6", "--device-share", "0.6", "--host-share", "0.6", "--dir", str(tmp_path)]
    settings = [word for value in ("gate=false", "load_timeout=60") for word in ("--set", value)]
    done = subprocess.run([*command, *options, *settings], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["bit_exact"]
    assert said["restored_blocks"]["host"] > 0
    assert said["fetched_bytes"] > 0
    assert list(tmp_path.iterdir()) == []
