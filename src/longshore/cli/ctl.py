"""`longshore ctl`: commands to a running engine, over the socket that its setting `control` names."""

from __future__ import annotations

import enum
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from longshore.cli.output import console as console_on
from longshore.cli.output import table, write_json
from longshore.errors import ConfigError
from longshore.runtime.control import MOST_BYTES, ask, socket_path

_LONGEST_WAIT = 86_400


class Command(enum.StrEnum):
    """What the engine is to do."""

    LOOKUP = "lookup"
    PIN = "pin"
    UNPIN = "unpin"
    CLEAR = "clear"
    STATS = "stats"


def ctl(
    engine: Annotated[
        str,
        typer.Argument(help="The value of the engine's setting control: a name, or the absolute path of a socket."),
    ],
    command: Annotated[
        Command,
        typer.Argument(
            help="lookup: which tier has how many leading chunks of a prompt. pin: keep what the tiers have of it from "
            "eviction. unpin: end that, for one prompt or for all. clear: drop what the tiers have; requests go on. "
            "stats: the metrics as JSON."
        ),
    ],
    tokens: Annotated[
        str | None,
        typer.Option(help="Token ids of the prompt, with commas: 1,2,3; or @FILE, with ids in text or a JSON list."),
    ] = None,
    keys: Annotated[
        str | None,
        typer.Option(
            help="Instead of tokens: whole keys of its chunks, 64 hexadecimal digits each, with commas, or @FILE."
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the engine's answer, at most 86,400.")] = 15.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the engine's answer as one JSON object.")] = False,
) -> None:
    """Look into a running engine, pin prompts, and clear its tiers.

    The engine has a socket if its setting [bold]control[/] names it: Config.make(control="one", ...) for PrefixStore
    and tiered, longshore vllm-config or sglang-config --set control=one. Only the engine's own user can use it. A
    prompt is given as the engine's tokenizer makes it, with all special tokens; only whole chunks count.

    [dim]longshore ctl one stats[/]

    [dim]longshore ctl one lookup --tokens @prompt.json[/]

    [dim]longshore ctl one pin --tokens @system-prompt.json[/]

    Pins last until unpin, clear, a reset of the engine's caches, or its end, and take at most a quarter of the host
    tier. clear drops the contents of host memory and files, pins included, also for later processes; stores that
    replicas share keep theirs.
    """
    if not 0 < timeout <= _LONGEST_WAIT:
        raise ConfigError(f"--timeout: expected a positive number of seconds, at most {_LONGEST_WAIT:,}, got {timeout}")
    about = [option for option, text in (("--tokens", tokens), ("--keys", keys)) if text is not None]
    if len(about) > 1:
        raise ConfigError("expected --tokens or --keys, got both")
    if about and command in (Command.CLEAR, Command.STATS):
        raise ConfigError(f"{command.value} concerns no prompt: remove {about[0]}")
    if not about and command in (Command.LOOKUP, Command.PIN):
        raise ConfigError(f"{command.value} needs a prompt: add --tokens or --keys")
    request: dict[str, Any] = {"command": command.value}
    if tokens is not None:
        request["tokens"] = [_number(each) for each in _items(tokens, "--tokens")]
    if keys is not None:
        request["keys"] = [_key(each) for each in _items(keys, "--keys")]
    if len(json.dumps(request)) > MOST_BYTES:
        raise ConfigError(f"{about[0]}: expected at most {MOST_BYTES} bytes of text; give the first part of the prompt")
    answer = ask(socket_path(engine), request, timeout)
    if as_json or command is Command.STATS:
        write_json(answer)
    else:
        _render(command, answer)


def _items(text: str, option: str) -> list[Any]:
    """Numbers or texts separated by commas or spaces, or a JSON list; `@FILE` is what the file has, `@-` the input."""
    if text.startswith("@"):
        try:
            text = sys.stdin.read() if text == "@-" else Path(text[1:]).read_text("utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{option} {text[:80]}: {getattr(error, 'strerror', None) or error}") from error
    if text.lstrip().startswith("["):
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{option}: expected a JSON list: {error}") from None
        return list(found)
    return text.replace(",", " ").split()


def _number(item: object) -> int:
    if isinstance(item, str) and item.isascii() and item.isdecimal() and len(item) < 20:
        return int(item)
    if type(item) is int and item >= 0:
        return item
    raise ConfigError(f"--tokens: expected token ids, whole numbers such as 1,2,3, got {str(item)[:40]!r}")


def _key(item: object) -> str:
    if isinstance(item, str) and re.fullmatch("[0-9a-fA-F]{64}", item):
        return item
    raise ConfigError(f"--keys: expected keys of chunks, 64 hexadecimal digits each, got {str(item)[:40]!r}")


def _render(command: Command, answer: Mapping[str, Any]) -> None:
    console = console_on()
    if command is Command.LOOKUP:
        groups = answer.get("groups", [answer])
        for number, group in enumerate(groups):
            name = "leading chunks" if len(groups) == 1 else f"chunks of group {number}"
            rows = table("tier", name, right=(name,))
            for run in group["runs"]:
                rows.add_row(run["tier"], f"{run['chunks']:,}")
            rows.add_row("none", f"{group['chunks'] - sum(run['chunks'] for run in group['runs']):,}", style="dim")
            console.print(rows)
        if len(groups) > 1:
            console.print(f"all groups have the first {answer['leading_tokens']:,} of {answer['tokens']:,} tokens")
    elif command is Command.PIN:
        console.print(f"{answer['pinned']:,} of {answer['chunks']:,} chunks are pinned")
    elif command is Command.UNPIN:
        console.print(f"{answer['unpinned']:,} chunks are not pinned any more")
    else:
        console.print(f"dropped: {_counted(answer['dropped'])}")
        if any(answer["left"].values()):
            console.print(f"left, as requests or copies in flight use them: {_counted(answer['left'])}")


def _counted(chunks: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} chunks in {tier}" for tier, count in chunks.items())
