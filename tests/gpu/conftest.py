"""Tests that need an NVIDIA GPU. Where there is none, nothing here is collected; `make gpu` then says so, and fails."""

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1] / "transfer"))

if not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]
