"""These tests run where vLLM is installed: `make vllm` sets up such an environment, and fails where it cannot."""

from importlib.util import find_spec

_found = find_spec("vllm")
_is_installed = (
    _found is not None and _found.origin is not None
)  # this very directory looks like a package of that name
collect_ignore_glob = [] if _is_installed else ["test_*"]
