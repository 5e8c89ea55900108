"""The scope of a transformers model's KV cache: configuration, weights and code, as they are in memory.

All weights are hashed where they are, not by file names and sizes: a fine-tuned copy of the same shape in the same
place must never be served another's blocks. On the CPU by xxh3, on an accelerator by mix64, a sum of words that are
each mixed with their position. Both change with any single bit, and when bytes change places. Addresses and `_version`
are ignored: `p.data.add_()` changes neither, and equal bytes have equal blocks at any address.

Code is digested as it is in force: class, hooks and attributes of every module, replaced functions included. A digest
is the same in every process for the same content:

    plain values, containers, tensors   by content; the order of sets, and of the keys of mappings, does not count
    storages, C data, memoryviews       by their bytes; C pointers are opaque
    functions                           by bytecode, constants, defaults, closure, and the globals that they name
    classes                             by name and code, with their bases; a value's class by name, if of a library
    other objects                       by class and attributes; without attributes, by what pickle keeps of them
    anything else, and iterators        opaque: by identity, which means nothing in another process

Code of torch, of the standard library and of Longshore, and the base classes of transformers, count by name, as their
versions are part of the scope; what other packages have put into them counts by content. With something opaque, such
as an open file in a hook's closure, the scope is private to this process: no later process finds its blocks.
"""

from __future__ import annotations

import _ctypes
import ctypes
import enum
import functools
import hashlib
import json
import logging
import os
import re
import secrets
import sys
import threading
import types
import weakref
from collections import deque, namedtuple
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextvars import ContextVar
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
import transformers
from transformers import PreTrainedConfig, masking_utils, modeling_utils

from longshore.engines.tensors import content, pack
from longshore.keys import Scope
from longshore.layout import KVLayout

_VERSIONED = sys.stdlib_module_names | {"builtins", "torch", "longshore"}
"""Packages whose code counts by name; ours is in the model's reach while its cache has tiers, and computes nothing."""

_CONSTANTS = (bool, int, float, complex, str, bytes, torch.dtype)
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format, np.dtype, PurePath, types.GenericAlias,
    types.UnionType)  # fmt: skip
_C_DATA: Any = ctypes.c_int.__mro__[-2]
_C_REFERENCES = (_ctypes._Pointer, _ctypes.CFuncPtr, ctypes.py_object)
_STATELESS = (logging.Logger, type(threading.Lock()), type(threading.RLock()), ContextVar, object, types.EllipsisType,
    type(vars(namedtuple("_Named", "field"))["field"]))  # fmt: skip
_CACHED = type(functools.lru_cache(lambda: None))
_CODE = (types.FunctionType, type, _CACHED, staticmethod, classmethod, property, functools.cached_property,
    functools.partial)  # fmt: skip
_BY_ROW, _BY_COLUMN = ("crow_indices", "col_indices", "values"), ("ccol_indices", "row_indices", "values")
_SPARSE = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), _BY_ROW),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), _BY_COLUMN),
}
"""Methods of sparse tensors that return their parts."""

_VOLATILE = frozenset({"_name_or_path", "transformers_version", "architectures", "_commit_hash"})
"""Fields of a model's configuration that name its origin, and do not change what it computes."""

_NOT_CODE = re.compile(
    r"__(module|doc|dict|weakref|annotat\w+|abstractmethods|firstlineno|static_attributes|orig_bases|parameters"
    r"|type_params|slots|slotnames|match_args|dataclass\w+)__|_abc_impl|_can_set_\w+_cached_value"
)
"""Attributes of classes that say nothing of what is computed."""

_NOT_STATE = re.compile(
    r"_(parameters|buffers|modules)|_(forward|backward|(load_)?state_dict)(_pre|_post)?_hooks\w*|_is_full_backward_hook"
    r"|generation_config|_cached_continuous_batching_manager|_is_hf_initialized|_output_capturing_hooks_installed"
    r"|tied_params_map|tied_pointers_to_remove"
    r"|(\w+_)?(max_seq_len_cached|original_inv_freq|long_inv_freq|seq_len_cached|cos_cached|sin_cached)|_dynamo_\w+"
)
"""Attributes of modules and tensors that are digested elsewhere, have no part in `forward`, or are set by it."""

_DEEPEST = 2
"""Modules behind one another that code may name, as in torch.nn.functional."""

_opaque: dict[int, object] = {}  # kept, so that no identity is used twice


class ValueDigester:
    """Digests of values that belong together. Made for one look: what it has seen is not looked at again.

    Attributes:
        opaque: Paths of the values of which only the identity is known.
    """

    def __init__(self, tensor: Callable[[torch.Tensor], bytes], modules: Mapping[torch.nn.Module, str]) -> None:
        """`tensor` digests a tensor's bytes; `modules` are digested by the caller, and count here by their names."""
        self.opaque: list[str] = []
        self._bytes_of = tensor
        self._modules = modules
        self._known: dict[int, tuple[object, bytes | None]] = {}

    def of(self, value: Any, path: str) -> bytes:
        """The digest of `value`, which is at `path`."""
        if value is None or type(value) in (bool, int, float, complex, str, bytes):
            return pack(type(value).__name__, repr(value))
        known = self._known.get(id(value))
        if known is not None:
            return known[1] or pack("cycle", _name(type(value)))
        self._known[id(value)] = (value, None)
        digest = pack(self._kind(type(value), path), self._content(value, path))
        self._known[id(value)] = (value, digest)
        return digest

    def attributes(self, values: Mapping[str, Any], path: str) -> bytes:
        """The digest of named values."""
        return pack(*(part for key in sorted(values) for part in (key, self.of(values[key], f"{path}.{key}"))))

    def module(self, module: torch.nn.Module, path: str) -> bytes:
        """Class, hooks and attributes of one module; neither its tensors nor the modules below it."""
        own = {key: each for key, each in vars(module).items() if not _NOT_STATE.fullmatch(key)}
        return pack(self.of(type(module), path), self.attributes(own, path), self.hooks(vars(module), "", path))

    def hooks(self, state: Mapping[str, Any], prefix: str, path: str) -> bytes:
        """Forward hooks of a module, or with `prefix` those of all modules, in their order, and how each is called."""
        parts: list[bytes | str] = []
        for name in (f"{prefix}_forward_hooks", f"{prefix}_forward_pre_hooks"):
            for key, hook in state[name].items():
                how = [key in state.get(name + flag, ()) for flag in ("_with_kwargs", "_always_called")]
                if getattr(hook, "__module__", "") != "transformers.utils.output_capturing":  # a forward adds these
                    parts += [name, repr(how), self.of(hook, f"{path}.{name}")]
        return pack(*parts)

    def _kind(self, cls: type, path: str) -> bytes | str:
        """The class of a value: its name; with its code, if it is of no library."""
        root = (cls.__module__ or "").split(".")[0]
        return _name(cls) if root in _VERSIONED or _is_library(root) else self.of(cls, path)

    def _content(self, value: Any, path: str) -> bytes:  # noqa: PLR0912 - a case for each kind of value
        match value:
            case enum.Enum():
                return pack(str(value.name), self.of(value.value, path))
            case torch.Tensor():
                return self._tensor(value, path)
            case torch.UntypedStorage():
                return self._bytes_of(torch.empty(0, dtype=torch.uint8, device=value.device).set_(value))
            case int() | float() | str() | bytes():
                plain = next(each for each in (int, float, str, bytes) if isinstance(value, each))
                return pack(plain.__repr__(value), self._own(value, path))
            case np.generic():
                return pack(str(value.dtype), value.tobytes())
            case np.ndarray() if not value.dtype.hasobject:
                parts = str(value.dtype), str(value.shape), np.ascontiguousarray(value).tobytes()
                return pack(*parts, *self._of_subclass(value, path))
            case list() | tuple() | deque():
                elements = (self.of(each, f"{path}[{at}]") for at, each in enumerate(value))
                return pack(*elements, *self._of_subclass(value, path))
            case Mapping():
                items = sorted((self.of(key, path), self.of(each, f"{path}[{key!r}]")) for key, each in value.items())
                factory = self.of(getattr(value, "default_factory", None), path)
                return pack(*(part for item in items for part in item), factory, self._own(value, path))
            case AbstractSet():
                return pack(*sorted(self.of(each, path) for each in value), *self._of_subclass(value, path))
            case torch.nn.Module():
                name = self._modules.get(value)
                return pack("named", name) if name is not None else self._external_module(value, path)
            case types.CodeType():
                return self._code(value, path)
            case types.FunctionType():
                return self._function(value, path)
            case types.MethodType():
                return pack(self.of(value.__func__, path), self.of(value.__self__, f"{path}.__self__"))
            case types.BuiltinFunctionType() | types.MethodWrapperType():
                owner = value.__self__
                bound = b"" if isinstance(owner, types.ModuleType | type) else self.of(owner, f"{path}.__self__")
                return pack(_name(value), bound)
            case functools.partial():
                return pack(self.of(value.func, path), self.of(value.args, path), self.of(value.keywords, path))
            case property() | staticmethod() | classmethod() | functools.cached_property():
                return pack(*(self.of(each, path) for each in _functions(value)))
            case type():
                return self._class(value, path)
            case types.ModuleType():
                return pack(value.__name__)
            case weakref.ref():
                return self.of(value(), path)
        if isinstance(value, _CACHED):
            return self.of(value.__wrapped__, path)
        if isinstance(value, _NAMED) or type(value).__module__ == "typing":
            return pack(str(value))
        if isinstance(value, types.WrapperDescriptorType | types.MethodDescriptorType | types.GetSetDescriptorType):
            return pack(_name(value))
        if isinstance(value, _C_REFERENCES):
            return self._identity(value, path)
        if isinstance(value, _C_DATA | memoryview):
            view = memoryview(value)
            return pack(view.format, str(view.shape), view.tobytes(), self._own(value, path))
        if type(value) in _STATELESS or isinstance(value, logging.Logger | types.MemberDescriptorType):
            return b""
        if hasattr(value, "__dict__") or _slots(value):
            return pack(self.of(type(value), path), self._own(value, path))
        try:
            kept = None if isinstance(value, Iterator) else value.__reduce_ex__(4)
        except Exception:  # noqa: BLE001 - code of any class
            kept = None
        if not isinstance(kept, tuple):
            return self._identity(value, path)
        return pack(*(self.of(list(part) if isinstance(part, Iterator) else part, path) for part in kept))

    def _of_subclass(self, value: Any, path: str) -> tuple[bytes, ...]:
        """Attributes of a container, if its class has any."""
        return (self._own(value, path),) if getattr(value, "__dict__", None) or _slots(value) else ()

    def _own(self, value: Any, path: str) -> bytes:
        own = {**getattr(value, "__dict__", {}), **_slots(value)}
        if isinstance(value, PreTrainedConfig):
            own = {key: each for key, each in own.items() if key not in _VOLATILE}
        if isinstance(value, torch.Tensor):
            own = {key: each for key, each in own.items() if not _NOT_STATE.fullmatch(key)}
        return self.attributes(own, path)

    def _identity(self, value: object, path: str) -> bytes:
        self.opaque.append(path)
        _opaque[id(value)] = value
        return pack(str(id(value)))

    def _tensor(self, value: torch.Tensor, path: str) -> bytes:
        """Dtype, shape and bytes; of a subclass, as quantised weights are, its attributes and inner tensors as well."""
        parts = [str(value.dtype).encode(), str(tuple(value.shape)).encode()]
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or vars(value):
            parts.append(self._own(value, path))
            if hasattr(value, "__tensor_flatten__"):
                names, context = value.__tensor_flatten__()
                inner = {name: getattr(value, name) for name in names}
                return pack(*parts, self.of(context, path), self.attributes(inner, path))
        if value.layout in _SPARSE and not value.is_meta:
            return pack(*parts, self.attributes({name: getattr(value, name)() for name in _SPARSE[value.layout]}, path))
        try:
            return pack(*parts, self._bytes_of(value))
        except (RuntimeError, NotImplementedError, TypeError):  # it has no bytes here: meta
            return pack(*parts, self._identity(value, path))

    def _external_module(self, module: torch.nn.Module, path: str) -> bytes:
        """A module that a function or an object refers to, and the model does not contain."""
        parts = []
        for name, each in module.named_modules():
            where = f"{path}.{name}"
            tensors = self.attributes({**each._parameters, **each._buffers}, where)
            parts += [name.encode(), self.module(each, where), tensors]
        return pack(*parts)

    # ------------------------------------------------------------------ code

    def _function(self, function: types.FunctionType, path: str) -> bytes:
        code, package = function.__code__, _package(function)
        path = f"{path} {function.__qualname__}"
        bound = {"defaults": function.__defaults__, "keywords": function.__kwdefaults__, **vars(function)}
        parts: list[bytes | str] = [function.__module__ or "", function.__qualname__, self.attributes(bound, path)]
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                parts += [name, self.of(cell.cell_contents, f"{path} closure {name}")]
            except ValueError:  # the cell is empty
                parts += [name, b""]
        if package not in _VERSIONED:
            parts += [self.of(code, path), *self._globals(function, package, path)]
        return pack(*parts)

    def _globals(self, function: types.FunctionType, package: str, path: str) -> list[bytes | str]:
        """What code names of its module: code and constants; in a module that is not of a library, all it names."""
        parts: list[bytes | str] = []
        names, is_library = _names(function.__code__), _is_library(package)
        for name in sorted(names & function.__globals__.keys()):
            value, where = function.__globals__[name], f"{path} global {name}"
            if isinstance(value, types.ModuleType):
                parts += [name, self._named_of(value, names, where)]
            elif not is_library or isinstance(value, _CONSTANTS + _CODE):
                parts += [name, self.of(value, where)]
        return parts

    def _named_of(self, module: types.ModuleType, names: AbstractSet[str], path: str, depth: int = 0) -> bytes:
        """What code may use of a module: of a library's what others have put there, else all that has such a name."""
        root, parts = module.__name__.split(".")[0], list[bytes | str]()
        for name in sorted(names & vars(module).keys()):
            value, where = vars(module)[name], f"{path}.{name}"
            if isinstance(value, types.ModuleType):
                parts += [name, self._named_of(value, names, where, depth + 1) if depth < _DEEPEST else b""]
            elif not (root in _VERSIONED or _is_library(root)) or _is_patch(value, root):
                parts += [name, self.of(value, where)]
        return pack(*parts)

    def _class(self, cls: type, path: str) -> bytes:
        parts: list[bytes | str] = []
        for base in cls.__mro__[:-1]:
            module = base.__module__ or ""
            root = module.split(".")[0]
            own = {key: each for key, each in vars(base).items() if not _NOT_CODE.fullmatch(key)}
            is_model = ".models." in module and not module.startswith("transformers.models.auto.")
            if root in _VERSIONED or (root == "transformers" and not is_model):
                own = {key: each for key, each in own.items() if _is_patch(each, root)}
            parts += [_name(base), self.attributes(own, f"{path} {base.__qualname__}")]
        return pack(*parts)

    def _code(self, code: types.CodeType, path: str) -> bytes:
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        return pack(code.co_code, code.co_exceptiontable, repr(counts), repr(names), self.of(code.co_consts, path))


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"


def _names(code: types.CodeType) -> set[str]:
    """All names of globals and attributes in `code`, that of inner functions included."""
    inner = (_names(each) for each in code.co_consts if isinstance(each, types.CodeType))
    return set(code.co_names).union(*inner)


def _package(function: types.FunctionType) -> str:
    """The package that the code was written in: a decorator may have copied another one's `__module__`."""
    return str(function.__globals__.get("__name__", "")).split(".")[0]


@functools.cache
def _is_library(package: str) -> bool:
    """Whether a package was installed; a script, or a user's module, was not."""
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    return package == "transformers" or "site-packages" in file or "dist-packages" in file


def _functions(value: Any) -> tuple[Any, ...]:
    """The functions in a descriptor of a class."""
    match value:
        case property():
            return value.fget, value.fset, value.fdel
        case staticmethod() | classmethod():
            return (value.__func__,)
        case functools.cached_property() | functools.partial():
            return (value.func,)
    return (value,)


def _is_patch(value: Any, package: str) -> bool:
    """Whether `value`, found in `package`, is a function that was written elsewhere, or wraps one that was."""
    waiting = list(_functions(value))
    while waiting:
        function = waiting.pop()
        if isinstance(function, types.FunctionType):
            written_in = _package(function)
            if written_in != package and written_in not in _VERSIONED:
                return True
        waiting += [function.__wrapped__] if hasattr(function, "__wrapped__") else []
    return False


def _slots(value: Any) -> dict[str, Any]:
    names = [
        f"_{base.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else str(name)
        for base in type(value).__mro__
        for name in np.atleast_1d(vars(base).get("__slots__", ()))
    ]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


_TOKEN = secrets.token_hex(16)
_log = logging.getLogger(__name__)
_told: set[str] = set()


class ModelScope:
    """The scope of one model's KV cache, looked at anew with each call; with `fixed`, weights and code only once."""

    def __init__(self, model: Any, salt: str, *, fixed: bool = False) -> None:
        self._model = model
        self._salt = salt
        self._fixed = fixed
        self._seen: tuple[str, str] | None = None

    def compute_scope(self, layout: KVLayout) -> Scope:
        """What must be equal for two models' blocks under equal tokens to be equal. Hashes the weights unless fixed."""
        model, group = self._model, layout.groups[0]
        if self._seen is None or not self._fixed:
            self._seen = weights_digest(model), code_digest(model)
        weights, code = self._seen
        return Scope(
            model=config_digest(model.config),
            weights=weights,
            dtype=str(model.dtype),
            layout=layout.fingerprint,
            block_size=group.block_size,
            blocks_per_chunk=group.blocks_per_chunk,
            group=group.name,
            ranks=layout.ranks,
            attention=f"{_computed_by(model)}, code {code}",
            salt=self._salt,
        )


def config_digest(config: Any) -> str:
    """Digest of the effective configuration: rope, quantisation and all, but not where it was loaded from."""
    effective = {key: value for key, value in config.to_dict().items() if key not in _VOLATILE}
    return hashlib.sha256(json.dumps(effective, sort_keys=True, default=str).encode()).hexdigest()


def weights_digest(model: Any) -> str:
    """Digest of every parameter and buffer: name, dtype, shape and bytes."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return _private_if_opaque(ValueDigester(content, {}), lambda digester: digester.attributes(tensors, "model"))


def code_digest(model: Any) -> str:
    """Digest of the code that computes the cache: every module's class, hooks and attributes, and what these refer to.

    Of attention and masks the functions that are in force; the hooks of all modules, too.
    """
    modules = {module: name for name, module in model.named_modules()}
    kinds = {getattr(getattr(module, "config", None), "_attn_implementation", None) for module in modules}
    registries = modeling_utils.ALL_ATTENTION_FUNCTIONS, masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    in_force = {
        f"{type(registry).__name__}[{kind}]": registry.get(kind, None)
        for registry in registries
        for kind in kinds
        if isinstance(kind, str)
    }

    tensors = {id(each): name for name, each in (*model.named_parameters(), *model.named_buffers())}

    def parts_of(module: torch.nn.Module) -> str:
        """Which module, parameter or buffer has which name in `module`: several may share one."""
        own = {key: tensors.get(id(each)) for key, each in (*module._parameters.items(), *module._buffers.items())}
        return repr([(key, modules.get(each)) for key, each in module._modules.items()] + sorted(own.items()))

    def look(digester: ValueDigester) -> bytes:
        parts: list[bytes | str] = [digester.attributes(in_force, "transformers")]
        parts.append(digester.hooks(vars(torch.nn.modules.module), "_global", "torch.nn.Module"))
        for module, name in modules.items():
            parts += [parts_of(module), digester.module(module, f"model.{name}")]
        return pack(*parts)

    return _private_if_opaque(ValueDigester(content, modules), look)


def _private_if_opaque(digester: ValueDigester, look: Callable[[ValueDigester], bytes]) -> str:
    """What `look` finds. If some of it is opaque, that is said once, and the digest is one of this process."""
    found = look(digester).hex()
    if not digester.opaque:
        return found
    for path in sorted(set(digester.opaque) - _told):
        _told.add(path)
        _log.warning(
            "%s is not hashable by content: KV blocks of this model are valid only until this process exits, so none "
            "are found after a restart; keep such state in plain values, tensors or attributes, or remove the object "
            "that refers to it",
            path,
        )
    return f"{found} in process {_TOKEN} {os.getpid()}"


def _computed_by(model: Any) -> str:
    """The code and the kind of device that compute the bytes, and how exactly: their numerics differ."""
    kind, matmul = model.device.type, torch.backends.cuda.matmul
    numerics = (
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None,
        (matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction),
        torch.backends.cudnn.allow_tf32,
        torch.backends.mkldnn.enabled,
    )
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    python = f"python {sys.version_info.major}.{sys.version_info.minor}"
    return f"{model.config._attn_implementation} on {kind}, {versions}, {python}, numerics {numerics}"
