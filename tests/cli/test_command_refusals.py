"""What cannot be is refused by every command: in words that name it, with status 2, and never by a traceback."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import pytest
from typer.testing import CliRunner

from longshore.cli.app import app
from longshore.errors import LongshoreError

EXCERPT = str(resources.files("longshore.trace").joinpath("data", "conversation_excerpt.jsonl"))
MODEL = ("--model", "llama-3.1-8b")
COMMANDS = {"plan": ("plan", EXCERPT, *MODEL), "replay": ("replay", EXCERPT, *MODEL, "--host", "4GiB")}


def refusal(*arguments: str) -> str:
    """The words that a command refuses with: those of a typed error, which `main` prints, or of the option parser."""
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "400", "TERMINAL_WIDTH": "400"})
    if isinstance(done.exception, LongshoreError):
        return str(done.exception)
    assert isinstance(done.exception, SystemExit), repr(done.exception)
    assert done.exit_code == 2, done.output
    return " ".join(done.stderr.split())


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "the file is empty"),
        (b"\n \n", "the file is empty"),
        (b"{}\n", "expected the first line to have a field"),
        (b"[1]\n", "expected a JSON object"),
        (b"\x00\xff\xfe\n", "expected a JSON object in UTF-8"),
        (b"when,what\n1,2\n", "expected a header with a column"),
    ],
)
def test_what_is_no_trace(command: str, content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(content)
    assert words in refusal(command, str(path), *COMMANDS[command][2:])


@pytest.mark.parametrize("command", COMMANDS)
def test_a_trace_or_a_page_that_is_somewhere_else(command: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "Is a directory" in refusal(command, str(tmp_path), *COMMANDS[command][2:])
    assert "No such file" in refusal(command, str(tmp_path / "gone"), *COMMANDS[command][2:])
    assert "--report" in refusal(*COMMANDS[command], "--report", str(tmp_path / "file" / "page"))


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("none", "expected a JSON object"),
        ("[]", "expected a JSON object"),
        ("{}", "expected 'num_hidden_layers' to be an integer from 1 to 1000000000000, got 'None'"),
        ('{"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 0}', "'num_attention_heads'"),
        ('{"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "dtype": "int4"}', "expected a dtype"),
    ],
)
def test_a_config_that_says_too_little(command: str, config: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(config)
    assert words in refusal(*COMMANDS[command], "--model", str(path))


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("report", "words"),
    [
        ({}, "a JSON object with a field 'cases' or 'chosen'"),
        ([], "a JSON object with a field 'cases' or 'chosen'"),
        ({"cases": [{"value": 1}]}, "each of 'cases' has a name, a value and a unit"),
        ({"cases": []}, "found none of them"),
        ({"cases": [{"name": "read/2MiB", "value": "much", "unit": "GB/s"}]}, "expected what `longshore bench"),
        ({"cases": [{"name": "read/2MiB", "value": -1, "unit": "GB/s"}]}, "file_read: expected a positive number"),
        ({"chosen": [{"direction": "onboard"}]}, "gb_per_s"),
    ],
)
def test_a_benchmark_that_says_nothing(command: str, report: object, words: str, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(report))
    assert words in refusal(*COMMANDS[command], "--bench", str(path))


@pytest.mark.parametrize(
    ("prices", "words"),
    [
        (b"dram_per_gib = 1\n", "expected dram_per_gib, nvme_per_gib"),
        (b"dram_per_gib = -1\nnvme_per_gib = 1\n", "(positive;"),
        (b"dram_per_gib = 0\nnvme_per_gib = 1\n", "(positive;"),
        (b"dram_per_gib = nan\nnvme_per_gib = 1\n", "(positive;"),
        (b"dram_per_gib = 1\nnvme_per_gib = inf\n", "(positive;"),
        (b"dram_per_gib = true\nnvme_per_gib = 1\n", "(positive;"),
        (b"dram_per_gib = '1'\nnvme_per_gib = 1\n", "(positive;"),
        (b"dram_per_gib = 1\nnvme_per_gib = 1\ncurrency = 3\n", "currency"),
        (b"dram_per_gib = 1\nnvme_per_gib = 1\ntape_per_gib = 1\n", "tape_per_gib"),
        (b"dram_per_gib", "expected prices in TOML"),
        (b"\xff\xfe", "expected prices in TOML"),
        (None, "expected prices in TOML"),
    ],
)
def test_prices_that_are_none(prices: bytes | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    if prices is not None:
        path.write_bytes(prices)
    found = refusal(*COMMANDS["plan"], "--prices", str(path))
    assert str(path) in found
    assert words in found


@pytest.mark.parametrize("command", ["explain", "fsck", "inspect"])
def test_a_path_that_is_not_what_it_should_be(command: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"\xff\xfe\n")
    assert "Missing argument" in refusal(command)
    for path in ("gone", "file", ".", "file/below"):
        assert str(tmp_path) in refusal(command, str(tmp_path / path)), path


def test_events_of_something_else_or_of_nobody(tmp_path: Path) -> None:
    assert "line 1: expected an event" in refusal("explain", EXCERPT)
    (tmp_path / "events").write_text("")
    assert "no event is about a request called 'r'" in refusal("explain", str(tmp_path / "events"), "--request", "r")


def test_main_says_it_in_one_line_with_status_two(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from longshore.cli.app import main

    monkeypatch.setattr("sys.argv", ["longshore", "plan", "/nowhere", *MODEL])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert capsys.readouterr().err == "longshore: cannot read trace /nowhere: No such file or directory\n"
