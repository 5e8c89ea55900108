"""These tests run where vLLM is installed: `make vllm` sets up such an environment, and fails where it cannot."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("vllm") else ["test_*"]
