"""Adapter of SGLang: a storage back end for its hierarchical cache (docs/sglang.md).

storage.py    what SGLang loads and calls: pages in and out of files
tiers.py      the tiers behind each host pool
pool.py       the pages of SGLang's host memory as a layout
identity.py   the scope: model, weights, settings, rank; and what is refused
flags.py      settings, and the flags that `longshore sglang-config` prints; needs no SGLang
contract.py   what is relied on inside SGLang
"""
