"""A process that has imported vLLM, and forks one process for each engine that a test asks for: python zygote.py

Reads lines of JSON, {"script": ..., "arguments": [...], "out": FILE, "errors": FILE}, and answers each with the number
of the process that runs the script, and with its exit status once it has ended. Importing vLLM takes most of an
engine's start; a fork has all modules at once, and tears none of them down, which would take longer than the rest of
most scripts. No engine lives in this process itself.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import NoReturn


def main() -> None:
    import serving  # noqa: F401 - sets the environment that torch and vLLM read while they are imported

    preload()
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if not pid:
            become(order)
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    os._exit(0)


def preload() -> None:
    """Import what every engine imports."""
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from transformers import AutoModelForCausalLM  # noqa: F401
    from vllm import LLM  # noqa: F401

    import longshore.engines.vllm  # noqa: F401


def become(order: dict[str, object]) -> NoReturn:
    """Run the script as `python SCRIPT ARGUMENTS` would, in a process group of its own, and end without teardown."""
    os.setsid()
    for name, descriptor, flags in (("out", 1, os.O_WRONLY), ("errors", 2, os.O_WRONLY)):
        os.dup2(os.open(str(order[name]), flags | os.O_CREAT | os.O_TRUNC, 0o600), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    script, arguments = str(order["script"]), order["arguments"]
    sys.argv = [script, *(arguments if isinstance(arguments, list) else [])]
    sys.path[0] = str(Path(script).parent)
    status = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except BaseException:  # noqa: BLE001 - nothing above catches it
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
