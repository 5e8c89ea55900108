"""What tests of the command line share: short names of calls, and the files that the calls name."""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from importlib import resources
from pathlib import Path

LONGSHORE = Path(sys.executable).with_name("longshore")
EXCERPT = resources.files("longshore.trace").joinpath("data", "conversation_excerpt.jsonl").read_bytes()

SHORT = {
    "REPLAY": "replay trace.jsonl --model llama-3.1-8b --host 4GiB",
    "POLICY": "replay trace.jsonl --capacity-blocks 5",
    "PLAN": "plan trace.jsonl --model llama-3.1-8b",
}


def expanded(call: str) -> str:
    """`call` with the names in `SHORT` replaced."""
    for short, long in SHORT.items():
        call = call.replace(short, long)
    return call


def write_files(directory: Path) -> None:
    """Write the files that the calls name into `directory`."""

    def line(at: int, ids: list[int]) -> str:
        return json.dumps({"timestamp": at, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids}) + "\n"

    llama = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 2}
    llama |= {"intermediate_size": 64, "vocab_size": 128}
    contents: dict[str, bytes | str] = {
        "trace.jsonl": EXCERPT,
        "empty": b"",
        "binary": bytes(range(256)),
        "half.gz": gzip.compress(EXCERPT, mtime=0)[:1000],
        "backwards.jsonl": line(0, [1]) + line(700, [2]) + line(500, [3]),
        "twice.jsonl": line(0, [1, 2, 1]),
        "header.csv": "timestamp,input_length,output_length\n",
        "config.json": "{}",
        "time.jsonl": '{"kind":"request","at":"x","request":"r","keys":["aa"]}\n',
        "endless.jsonl": '{"kind":"request","at":1e400,"request":"r","keys":["aa"]}\n',
        "named.jsonl": '{"kind":"request","at":1,"request":5,"keys":["aa"]}\n',
        "listed.jsonl": '{"kind":["request"]}\n',
        "count.jsonl": '{"kind":"request","at":1,"request":"r","keys":["aa"],"length":"x"}\n',
        "deep.json": 100_000 * "[" + "\n",
        "deep.toml": "currency = " + 5000 * "[" + "\n",
        "dear.toml": f"dram_per_gib = {10**400}\nnvme_per_gib = 1\n",
        "free.toml": "dram_per_gib = 0\nnvme_per_gib = 1\n",
        "llama.json": json.dumps(llama),
        "vast.json": json.dumps(llama | {"num_hidden_layers": 10**400}),
        "fast.json": json.dumps({"cases": [{"name": "read/1MiB", "value": 10**400, "unit": "GB/s"}]}),
        "huge.json": json.dumps(llama | {"num_hidden_layers": 10**6, "hidden_size": 10**5}),
    }
    for name, content in contents.items():
        (directory / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def in_terminal(columns: int, *arguments: str | Path) -> str:
    """What `longshore` prints in a terminal of so many columns, without styles."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 1000, columns, 0, 0))
    plain = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    with subprocess.Popen([LONGSHORE, *arguments], stdout=theirs, env={**plain, "TERM": "dumb"}) as running:
        os.close(theirs)
        shown = b""
        try:
            while more := os.read(ours, 1 << 16):
                shown += more
        except OSError:  # as Linux says that nobody has the other end
            pass
        os.close(ours)
    assert running.returncode == 0
    return shown.decode().replace("\r", "")
