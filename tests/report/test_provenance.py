"""Every report says how it was made."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path

import pytest

import longshore
from longshore.cli.output import ReportOptions, provenance, provenance_lines
from longshore.errors import ConfigError, ReportError

EXCERPT = str(resources.files("longshore.trace").joinpath("data", "conversation_excerpt.jsonl"))
MODEL = ("--model", "llama-3.1-8b", "--limit", "20")
REPORTS = {
    "replay": ("replay", EXCERPT, *MODEL, "--host", "4GiB"),
    "plan": ("plan", EXCERPT, *MODEL, "--replays", "1"),
    "experiment": ("replay", EXCERPT, "--capacity-blocks", "50", "--limit", "20"),
    "bench": ("bench", "plan", "--repeats", "1", "--case", "plan/8-refs"),
}


def longshore_says(*arguments: str) -> str:
    command = [sys.executable, "-c", "from longshore.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("name", REPORTS)
def test_json_and_text_say_how_they_were_made(name: str) -> None:
    about = json.loads(longshore_says(*REPORTS[name], "--json"))["provenance"]
    assert about["version"] == longshore.__version__
    assert about["command"].startswith(f"longshore {REPORTS[name][0]} ")
    assert about["command"].endswith(" --json")
    assert "cores" in about["machine"]
    assert abs((datetime.now(UTC) - datetime.fromisoformat(about["date"])).days) <= 1
    assert about["seed"] == (0 if name == "bench" else None)
    if name in ("plan", "experiment"):
        return  # their text ends as that of a replay
    first, machine, command = longshore_says(*REPORTS[name]).splitlines()[-3:]
    assert first.startswith(f"longshore {longshore.__version__}, 20")
    assert first.endswith("seed 0" if name == "bench" else "no random numbers")
    assert (machine, command) == (about["machine"], about["command"].removesuffix(" --json"))


def test_a_page_says_how_it_was_made(tmp_path: Path) -> None:
    longshore_says(*REPORTS["replay"], "--report", str(tmp_path / "page"))
    footer = (
        (tmp_path / "page" / "index.html").read_text().replace("\u00a0", " ").split("<footer>")[1].split("</footer>")[0]
    )
    for words in (f"longshore {longshore.__version__}, 20", "cores", "--host 4GiB --report", "no random numbers"):
        assert words in footer


def test_a_seed_of_zero_is_a_seed() -> None:
    assert provenance_lines(provenance(0))[0].endswith(", seed 0")


def test_images_without_chromium_are_refused_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LONGSHORE_BROWSER", "/nowhere/chromium")
    with pytest.raises(ReportError, match="apt-get install chromium"):
        ReportOptions(None, tmp_path / "svg", None).check()
    (tmp_path / "file").write_text("")
    for option, given in {"--svg": (None, tmp_path / "file", None), "--png": (None, None, tmp_path / "file")}.items():
        with pytest.raises(ConfigError, match=f"{option} .*: File exists"):
            ReportOptions(*given).check()
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
    assert not ReportOptions().check()
