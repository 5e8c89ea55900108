"""Stands in for SGLang's CPU kernels, which no package index has: what the CPU path calls without AMX, in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
) -> None:
    at = 0
    for request, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        req_to_token[request, start:end] = out_cache_loc[at : at + end - start].to(req_to_token.dtype)
        at += end - start


def _missing(name: str) -> Callable[..., NoReturn]:
    def call(*arguments: Any, **named: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is a stub here")

    return call


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)
    return _missing(name)
