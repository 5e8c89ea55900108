"""What changes the KV cache of a model changes its scope; what does not, in this process or another, leaves it."""

from __future__ import annotations

import array
import ctypes
import enum
import functools
import itertools
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    modeling_utils,
)
from transformers.models.llama import modeling_llama

from longshore import checksums
from longshore.engines.tensors import mix64
from longshore.engines.transformers.scope import ModelScope
from longshore.layout import from_rows

SHAPE = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
SCALE = [2.0]


def make_model() -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE, **HEADS)).eval()


def scope(model: Any, salt: str = "") -> bytes:
    layout = from_rows(torch.zeros(4, 64, dtype=torch.uint8), pages_per_block=4, block_size=16)
    return ModelScope(model, salt).compute_scope(layout).digest


def attention(model: Any) -> str:
    layout = from_rows(torch.zeros(4, 64), pages_per_block=4, block_size=16)
    return ModelScope(model, "").compute_scope(layout).attention


def layer(model: Any) -> Any:
    return model.model.layers[0]


def triple(module: Any, args: Any, output: Any) -> Any:
    return 3 * output


def scaled_by_a_global(module: Any, args: Any, output: Any) -> Any:
    return SCALE[0] * output


def scaled_by(factor: Any) -> Callable[..., Any]:
    return lambda module, args, output: factor * output


class Scaled(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def replaced_forward(module: Any, factor: float) -> None:
    module.forward = lambda x: factor * type(module).forward(module, x)


def scaling_list(factor: float) -> list[float]:
    class Factors(list[float]):
        def __getitem__(self, at: Any) -> Any:
            return factor

    return Factors([1.0])


def scaling_tensor(factor: float) -> type[torch.Tensor]:
    class Weight(torch.Tensor):
        def __matmul__(self, other: Any) -> Any:
            return factor

    return Weight


class Silent(float):
    def __repr__(self) -> str:
        return "a number"


def projections(model: Any) -> tuple[nn.Module, nn.Module]:
    return layer(model).self_attn.k_proj, layer(model).self_attn.v_proj


CHANGES: dict[str, Callable[[Any], object]] = {
    "hook": lambda m: layer(m).register_forward_hook(triple),
    "hook with keywords": lambda m: layer(m).register_forward_hook(lambda *_: None, with_kwargs=True),
    "hook before": lambda m: layer(m).self_attn.register_forward_pre_hook(lambda module, args: args),
    "hook that is an object": lambda m: layer(m).mlp.register_forward_hook(functools.partial(triple)),
    "replaced forward": lambda m: replaced_forward(layer(m).mlp, 1.5),
    "forward of another object": lambda m: setattr(layer(m).mlp, "forward", layer(m).self_attn.o_proj.forward),
    "eps": lambda m: setattr(layer(m).input_layernorm, "variance_epsilon", 1e-3),
    "scaling": lambda m: setattr(layer(m).self_attn, "scaling", 0.3),
    "activation": lambda m: setattr(layer(m).mlp, "act_fn", nn.GELU()),
    "activation function": lambda m: (delattr(layer(m).mlp, "act_fn"), setattr(layer(m).mlp, "act_fn", torch.tanh)),
    "rotary scaling": lambda m: setattr(m.model.rotary_emb, "attention_scaling", 1.1),
    "rotary frequencies": lambda m: m.model.rotary_emb.inv_freq.data.mul_(1.01),
    "tensor attribute": lambda m: setattr(layer(m), "bias", torch.ones(3)),
    "setting of a module": lambda m: setattr(m.config, "rms_norm_eps", 1e-3),
    "causality": lambda m: setattr(layer(m).self_attn, "is_causal", False),
    "training mode": lambda m: layer(m).train(),
    "dtype attribute": lambda m: setattr(layer(m), "compute_dtype", torch.bfloat16),
    "nested object": lambda m: setattr(layer(m), "settings", SimpleNamespace(deep=[{"factor": 2}])),
    "class of a module": lambda m: setattr(layer(m).mlp, "__class__", type("MyMLP", (type(layer(m).mlp),), {})),
    "parametrization": lambda m: parametrize.register_parametrization(layer(m).mlp.up_proj, "weight", Scaled(2.0)),
    "weight by .data": lambda m: layer(m).self_attn.k_proj.weight.data.add_(1e-3),
    "two elements that change places": lambda m: (
        layer(m).mlp.up_proj.weight.data[0].copy_(layer(m).mlp.up_proj.weight.data[0].flip(0))
    ),
    "attention": lambda m: m.set_attn_implementation("eager"),
    "device of a module": lambda m: setattr(layer(m), "execution_device", torch.device("meta")),
    "adapter": lambda m: layer(m).mlp.up_proj.add_module("lora_A", nn.Linear(2, 2)),
}


@pytest.fixture(scope="module")
def original() -> bytes:
    return scope(make_model())


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_has_another_scope(change: str, original: bytes) -> None:
    model = make_model()
    assert scope(model) == original
    CHANGES[change](model)
    assert scope(model) != original


PAIRS: dict[str, tuple[Callable[[Any], object], Callable[[Any], object]]] = {
    "constants of a hook": (
        lambda m: layer(m).register_forward_hook(lambda a, b, c: 2 * c),
        lambda m: layer(m).register_forward_hook(lambda a, b, c: 3 * c),
    ),
    "closure of a hook": tuple(
        lambda m, f=f: layer(m).register_forward_hook(scaled_by(f)) for f in (2.0, torch.tensor(2.5))
    ),
    "tensor in a closure": tuple(
        lambda m, f=f: layer(m).register_forward_hook(scaled_by(torch.tensor([1.0, f]))) for f in (2.0, 3.0)
    ),
    "defaults of a hook": (
        lambda m: layer(m).register_forward_hook(lambda a, b, c, f=2: f * c),
        lambda m: layer(m).register_forward_hook(lambda a, b, c, f=3: f * c),
    ),
    "bound object of a hook": tuple(
        lambda m, f=f: layer(m).register_forward_hook(functools.partial(SimpleNamespace(f=f).__eq__)) for f in (2, 3)
    ),
    "module in a closure": tuple(
        lambda m, f=f: layer(m).register_forward_hook(scaled_by(Scaled(f))) for f in (2.0, 3.0)
    ),
    "parametrization": tuple(
        lambda m, f=f: parametrize.register_parametrization(layer(m).mlp.up_proj, "weight", Scaled(f))
        for f in (2.0, 3.0)
    ),
    "opaque objects": tuple(
        lambda m, f=f: layer(m).register_forward_hook(scaled_by(f)) for f in (iter([1.0]), iter([2.0]))
    ),
    "factory of missing values": tuple(
        lambda m, f=f: setattr(layer(m), "scales", defaultdict(lambda: f)) for f in (2.0, 3.0)
    ),
    "value of a member": tuple(
        lambda m, f=f: setattr(layer(m), "kind", enum.Enum("Kind", {"SCALE": f}).SCALE) for f in (2.0, 3.0)
    ),
    "end of a long pattern": tuple(
        lambda m, end=end: setattr(layer(m), "names", re.compile(300 * "x" + end)) for end in "ab"
    ),
    "code of a list": tuple(lambda m, f=f: setattr(layer(m), "scales", scaling_list(f)) for f in (2.0, 3.0)),
    "code of a weight": tuple(
        lambda m, f=f: setattr(layer(m), "scales", torch.ones(3).as_subclass(scaling_tensor(f))) for f in (2.0, 3.0)
    ),
    "text of a float": tuple(lambda m, f=f: setattr(layer(m), "scale", Silent(f)) for f in (2.0, 3.0)),
    "which module is shared": tuple(
        lambda m, at=at: setattr(m.model.layers[1].self_attn, "v_proj", projections(m)[at]) for at in (0, 1)
    ),
    "which weight is shared": tuple(
        lambda m, at=at: setattr(m.model.layers[1].self_attn.v_proj, "weight", projections(m)[at].weight)
        for at in (0, 1)
    ),
    "order of hooks": tuple(
        lambda m, order=order: [layer(m).register_forward_hook(scaled_by(f)) for f in order]
        for order in ((2, 3), (3, 2))
    ),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_two_changes_have_two_scopes(pair: str) -> None:
    models = [make_model(), make_model()]
    for model, change in zip(models, PAIRS[pair], strict=True):
        change(model)
    assert scope(models[0]) != scope(models[1])
    assert scope(models[0]) == scope(models[0])


class Factors(list[float]):
    pass


class Hidden:
    __slots__ = ("__factor",)

    def set(self, factor: float) -> None:
        self.__factor = factor


EDITS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "bytearray": (lambda: bytearray(b"12"), lambda each: each.reverse()),
    "array": (lambda: array.array("f", [1.0]), lambda each: each.append(2.0)),
    "objects in an array": (lambda: np.array([1, None]), lambda each: each.fill(2)),
    "attribute of a list": (Factors, lambda each: setattr(each, "scale", 2.0)),
    "middle of a tensor in a namespace": (
        lambda: SimpleNamespace(each=torch.zeros(5000)),
        lambda names: names.each[2000:3000].fill_(1.0),
    ),
    "private slot": (Hidden, lambda each: each.set(2.0)),
    "conjugate": (lambda: torch.ones(3, dtype=torch.complex64).conj(), lambda each: each.fill_(2j)),
    "sparse": (lambda: torch.eye(3).to_sparse(), lambda each: each._values().fill_(2)),
    "compressed rows": (lambda: torch.eye(3).to_sparse_csr(), lambda each: each.values().fill_(2)),
    "compressed columns": (lambda: torch.eye(3).to_sparse_csc(), lambda each: each.values().fill_(2)),
    "attribute of a tensor": (lambda: torch.ones(3), lambda each: setattr(each, "scale", 2.0)),
    "attribute of a parameter": (lambda: nn.Parameter(torch.ones(3)), lambda each: setattr(each, "scale", 2.0)),
    "C array": (ctypes.c_float * 4, lambda each: each.__setitem__(3, 2.0)),
    "C number": (lambda: ctypes.c_double(1.0), lambda each: setattr(each, "value", 2.0)),
    "memoryview": (lambda: memoryview(bytearray(4)), lambda each: each.__setitem__(3, 2)),
    "storage": (lambda: torch.ones(3).untyped_storage(), lambda each: each.__setitem__(0, 2)),
    "typed storage": (lambda: vars(torch.ones(3).storage()), lambda each: each["_untyped_storage"].fill_(2)),
    "sparse weight": (lambda: nn.Parameter(torch.eye(3).to_sparse()), lambda each: each.data._values().fill_(2)),
}


@pytest.mark.filterwarnings("ignore:Sparse CS", "ignore:TypedStorage")
@pytest.mark.parametrize("edit", EDITS)
def test_values_edited_in_place_change_the_scope(edit: str) -> None:
    model, (make, change) = make_model(), EDITS[edit]
    value = make()
    layer(model).settings = value
    before = scope(model)
    assert scope(model) == before
    change(value)
    assert scope(model) != before


@pytest.mark.parametrize("value", [range(3), slice(1, 2), Decimal("1.5"), datetime(2026, 1, 1, tzinfo=UTC)], ids=str)
def test_plain_values_without_attributes_are_hashed_by_content(value: Any) -> None:
    model = make_model()
    layer(model).settings = value
    assert "in process" not in attention(model)


def test_code_that_names_automatic_classes_is_hashed() -> None:
    model = make_model()
    layer(model).kind = AutoModel
    assert "in process" not in attention(model)


def test_code_patched_from_outside_changes_the_scope(monkeypatch: pytest.MonkeyPatch, original: bytes) -> None:
    model = make_model()

    def mine(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError

    targets = [
        (modeling_llama.LlamaAttention, "forward"), (modeling_llama, "apply_rotary_pos_emb"),
        (modeling_llama, "rotate_half"), (modeling_llama.LlamaRMSNorm, "forward"), (nn.Linear, "forward"),
        (nn.Module, "_call_impl"), (nn.functional, "softmax"), (modeling_llama.DynamicCache, "update"),
        (modeling_llama.LlamaModel, "forward"),
    ]  # fmt: skip
    for owner, name in targets:
        for patch in (mine, torch.no_grad()(mine)):
            with monkeypatch.context() as patching:
                patching.setattr(owner, name, patch)
                assert scope(model) != original, (owner, name)
    assert scope(model) == original


def test_another_attention_function_changes_the_scope(monkeypatch: pytest.MonkeyPatch, original: bytes) -> None:
    model = make_model()
    functions = modeling_utils.ALL_ATTENTION_FUNCTIONS
    monkeypatch.setitem(functions, model.config._attn_implementation, lambda *args, **kwargs: None)
    assert scope(model) != original


def test_a_hook_on_all_modules_changes_the_scope(original: bytes) -> None:
    model = make_model()
    handle = nn.modules.module.register_module_forward_hook(triple)
    try:
        assert scope(model) != original
    finally:
        handle.remove()
    assert scope(model) == original


def test_a_changed_global_of_a_hook_changes_the_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    layer(model).register_forward_hook(scaled_by_a_global)
    before = scope(model)
    monkeypatch.setattr(sys.modules[__name__], "SCALE", [3.0])
    assert scope(model) != before


def test_numerics_are_part_of_the_scope(original: bytes) -> None:
    model = make_model()
    with torch.autocast("cpu", torch.bfloat16):
        assert scope(model) != original
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert scope(model) != original
    finally:
        torch.set_float32_matmul_precision(precision)
    assert scope(model) == original


def test_opaque_parts_are_private_to_this_process_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    layer(model).mlp.counter = itertools.count()
    assert "in process" in attention(model)
    assert scope(model) == scope(model)
    (record,) = [record for record in caplog.records if "is not hashable by content" in record.message]
    assert "model.model.layers.0.mlp.counter" in record.message
    assert "after a restart" in record.message


class Scales(NamedTuple):
    keys: float


def scaled_by_a_named_tuple(module: Any, args: Any, output: Any) -> None:
    assert Scales(1.0).keys


def test_code_that_names_a_named_tuple_is_digested() -> None:
    model = make_model()
    layer(model).register_forward_hook(scaled_by_a_named_tuple)
    assert "in process" not in attention(model)


def test_flags_without_a_name_are_digested() -> None:
    model = make_model()
    layer(model).flags = enum.Flag("Flags", ["A", "B"])(0)
    assert "in process" not in attention(model)


def test_c_pointers_are_private_to_this_process() -> None:
    model = make_model()
    layer(model).pointer = ctypes.pointer(ctypes.c_float(2.0))
    assert "in process" in attention(model)


def test_cycles_end() -> None:
    model = make_model()
    knot: dict[str, Any] = {"model": model}
    knot["self"] = [knot]
    layer(model).knot = knot
    assert scope(model) == scope(model)


@pytest.fixture
def used() -> Iterator[Any]:
    """A model that has done all that is to leave its scope alone."""
    model = make_model()
    tokens = torch.ones((1, 40), dtype=torch.long)
    with torch.no_grad():
        model(tokens, output_hidden_states=True, output_attentions=True)
        model.generate(tokens, max_new_tokens=3, do_sample=False)
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=4)
    batching = ContinuousBatchingConfig(page_size=16, num_blocks=16, max_batch_tokens=64)
    model.generate_batch([[1] * 20, [2] * 50], generation_config=generation, continuous_batching_config=batching)
    yield model


def test_used_model_keeps_its_scope(used: Any, original: bytes) -> None:
    assert scope(used) == original


def test_other_processes_with_other_hash_seeds_find_the_same_scope() -> None:
    children = []
    for seed in ("1", "2"):
        program = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_scope as t\n"
        program += "model = t.make_model(); print(t.scope(model).hex())\n"
        program += "t.layer(model).mlp.register_forward_hook(t.scaled_by(2.0))\n"
        program += "t.layer(model).names = {'b', 'a', 'c', ('d', 1)}; print(t.scope(model).hex())"
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", program]
        children.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    told = [child.communicate()[0] for child in children]
    assert [child.returncode for child in children] == [0, 0]
    ((plain, hooked),) = {tuple(each.split()[-2:]) for each in told}
    assert plain != hooked


@pytest.mark.parametrize("size", [1, 7, 8, 4096, 100_003])
def test_what_devices_compute_is_mix64(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    whole = np.concatenate([data, np.zeros(-size % 8, np.uint8)])
    assert mix64(torch.from_numpy(data)) == checksums.mix64(whole.tobytes())


def test_a_changed_bit_anywhere_in_a_large_tensor_is_seen() -> None:
    module = nn.Module()
    module.register_buffer("large", torch.zeros(40 << 20, dtype=torch.uint8))
    from longshore.engines.transformers.scope import weights_digest

    seen = {weights_digest(module)}
    for at in (0, (16 << 20) - 1, 16 << 20, (40 << 20) - 1):
        module.large[at] ^= 1
        seen.add(weights_digest(module))
        module.large[at] ^= 1
    assert len(seen) == 5
