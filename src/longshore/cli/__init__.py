"""The command line. Commands import torch, transformers and vLLM only when they need them."""

from longshore.cli.app import main

__all__ = ["main"]
