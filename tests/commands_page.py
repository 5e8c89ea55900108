"""docs/commands.md, made from the help of the `longshore` command: python tests/commands_page.py > docs/commands.md

`make commands` runs it. Only attributes are used that all versions of typer and click have: names of options, help
texts, defaults. How typer lays out its own help changes from release to release.
"""

from __future__ import annotations

import enum
import re
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from longshore.cli.app import app

HEAD = """# Commands

The help of `longshore` and its commands, made from the code by `make commands`. Errors are one line on standard error.
The exit status is 2 for a wrong call and 1 for an error at run time. `longshore COMMAND --help` names the types and
ranges of options, too.
"""


def page() -> str:
    """The whole page."""
    commands = dict(_commands("longshore", get_command(app)))
    listed = [f"| [{name}](#{name.replace(' ', '-')}) | {_summary(command)} |" for name, command in commands.items()]
    parts = [HEAD, "\n".join(["| command | what it does |", "|---|---|", *listed, ""])]
    parts += [_section(name, command) for name, command in commands.items()]
    return "\n".join(parts)


def _commands(name: str, group: Any) -> Iterator[tuple[str, Any]]:
    for key, command in group.commands.items():
        inner = getattr(command, "commands", None)
        if not command.hidden:
            yield from [(f"{name} {key}", command)] if inner is None else _commands(f"{name} {key}", command)


def _summary(command: Any) -> str:
    return _plain(re.split(r"\n\n", command.help)[0]).replace("\n", " ").replace("|", "\\|")


def _section(name: str, command: Any) -> str:
    shown = [each for each in command.params if "--help" not in each.opts and not getattr(each, "hidden", False)]
    arguments = [each for each in shown if each.param_type_name == "argument"]
    rows = [f"| {_names(each)} | {_meaning(each)} |" for each in shown]
    usage = " ".join([f"$ {name}", "[OPTIONS]" * (len(arguments) < len(shown)), *map(_placeholder, arguments)])
    table = "\n".join(["| | |", "|---|---|", *rows, ""]) if rows else ""
    return f"## {name}\n\n```\n{usage}\n```\n\n{_text(command.help)}\n\n{table}"


def _placeholder(argument: Any) -> str:
    name = (argument.metavar or argument.name).strip("[]{}.").upper() + "..." * (argument.nargs != 1)
    return name if argument.required else f"[{name}]"


def _names(parameter: Any) -> str:
    names = [_placeholder(parameter)] if parameter.param_type_name == "argument" else parameter.opts
    both = " / ".join([", ".join(names), *parameter.secondary_opts])
    return f"`{both}`"


def _meaning(parameter: Any) -> str:
    text = _plain(parameter.help or "").replace("\n", " ").replace("|", "\\|")
    default = parameter.default.value if isinstance(parameter.default, enum.Enum) else parameter.default
    if getattr(parameter, "show_default", False) and isinstance(default, str | int | float) and default is not False:
        if default is True and parameter.secondary_opts:
            default = parameter.opts[0]
        if default != "" and "default" not in text and default is not True:
            text = f"{text.rstrip('.')}. Default: `{default}`."
    return text


def _text(help_text: str) -> str:
    """A command's text, wrapped; examples, which are lines of their own, as blocks."""
    lines = [re.sub(r"^\[dim\](.*)\[/\]$", r"\1", line) for line in help_text.strip().splitlines()]
    text, example = [], re.compile(r"(longshore |vllm |eval |flags=)")
    for line in lines:
        if example.match(line):
            text.append(f"    {line}")
        else:
            text += textwrap.wrap(_plain(line), 120, break_on_hyphens=False) or [""]
    return re.sub(r"(?m)^((?!    ).+)\n(    )", r"\1\n\n\2", "\n".join(text))


def _plain(text: str) -> str:
    """Rich's markup as Markdown."""
    text = re.sub(r"\[(bold|dim|cyan)\](.*?)\[/\1?\]", lambda found: f"**{found[2]}**", text)
    return re.sub(r"<(\w+)>", r"\1", text).replace("\\[", "[")


if __name__ == "__main__":
    sys.stdout.write(page())
