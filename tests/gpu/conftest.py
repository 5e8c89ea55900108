"""Tests that need an NVIDIA GPU: nothing here is collected where there is none, and `make gpu` says so."""

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1] / "transfer"))

if not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]
