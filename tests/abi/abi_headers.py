"""What is called by ctypes, beside NVIDIA's headers: prototypes, structures, values and symbols. Run by `make abi`.

A small C++ program includes the headers of one version and says what stands there; this compares it with what
`cuda/driver.py` and `tiers/file/gds.py` say. Names are found in their source, so nothing is left out.
"""

from __future__ import annotations

import ast
import ctypes
import inspect
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import cuda.bindings.cufile as bindings
import pytest

import environments
from longshore.tiers.file import gds
from longshore.tiers.file.gds import CuFile
from longshore.transfer.device.cuda import driver

STRUCTURES: dict[type[ctypes.Structure], tuple[str, dict[str, str]]] = {
    driver.MemLocation: ("CUmemLocation", {"type": "type", "id": "id"}),
    driver.MemcpyAttributes: (
        "CUmemcpyAttributes",
        {
            "source_order": "srcAccessOrder",
            "source_hint": "srcLocHint",
            "destination_hint": "dstLocHint",
            "flags": "flags",
        },
    ),
}
VALUES = {
    "SOURCE_IN_STREAM_ORDER": "CU_MEMCPY_SRC_ACCESS_ORDER_STREAM",
    "PREFER_OVERLAP": "CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE",
    "_HOST_POINTERS_SERVE": "CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM",
    "_NON_BLOCKING": "CU_STREAM_NON_BLOCKING",
    "RELAXED": "CU_STREAM_CAPTURE_MODE_RELAXED",
}
MEANINGS = {
    "CUDA_SUCCESS": 0,
    "CU_GET_PROC_ADDRESS_SUCCESS": 0,
    "CU_STREAM_LEGACY": driver._NULL_STREAMS[1],
    "CU_FILE_HANDLE_TYPE_OPAQUE_FD": gds.OPAQUE_FD,
}
OURS_ALONE = {"MOST", "_NO_INDEX"}
BATCHED = {"BATCH_12_8": "PFN_cuMemcpyBatchAsync_v12080", "BATCH_13_0": "PFN_cuMemcpyBatchAsync_v13000"}
CUFILE = {
    "driver_open": ("cuFileDriverOpen", "s8()"),
    "driver_close": ("cuFileDriverClose", "s8()"),
    "handle_register": ("cuFileHandleRegister", "s8(p:p,p:s24)"),
    "handle_deregister": ("cuFileHandleDeregister", "void(p)"),
    "buf_register": ("cuFileBufRegister", "s8(p,u8,i4)"),
    "buf_deregister": ("cuFileBufDeregister", "s8(p)"),
    "read": ("cuFileRead", "i8(p,p,u8,i8,i8)"),
    "write": ("cuFileWrite", "i8(p,p,u8,i8,i8)"),
}

DESCRIBE = r"""
#include <cuda.h>
#include <cudaTypedefs.h>
#include <cufile.h>
#include <cstddef>
#include <cstdio>
#include <string>
#include <type_traits>

#define TEXT_OF(name) #name
#define TEXT(name) TEXT_OF(name)

template <class T, class = void> struct Whole : std::false_type {};
template <class T> struct Whole<T, std::void_t<decltype(sizeof(T))>> : std::true_type {};

template <class T> std::string of() {
  if constexpr (std::is_void_v<T>) {
    return "void";
  } else if constexpr (std::is_pointer_v<T>) {
    using To = std::remove_cv_t<std::remove_pointer_t<T>>;
    if constexpr (std::is_void_v<To> || std::is_function_v<To> || !Whole<To>::value) return "p";
    else return "p:" + of<To>();
  } else {
    const char* kind = std::is_class_v<T> ? "s" : std::is_enum_v<T> ? "e" : std::is_signed_v<T> ? "i" : "u";
    return kind + std::to_string(sizeof(T));
  }
}
template <class R, class... A> std::string signature(R (*)(A...)) {
  std::string all;
  ((all += (all.empty() ? "" : ",") + of<A>()), ...);
  return of<R>() + "(" + all + ")";
}
void say(const char* name, const std::string& what) { std::printf("%s %s\n", name, what.c_str()); }
int main() {
"""


def prototypes() -> dict[str, str]:
    """The driver's functions that `driver.py` asks for by name, and the names of their prototypes."""
    found = {}
    for node in ast.walk(ast.parse(inspect.getsource(driver))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "_function":
            name, prototype = node.args
            if isinstance(name, ast.Constant):
                assert isinstance(prototype, ast.Name)
                found[name.value] = prototype.id
    return found


def values(module: ModuleType) -> dict[str, int]:
    """Its plain numbers."""
    numbers = {name: value for name, value in vars(module).items() if type(value) is int and name.isupper()}
    return {name: value for name, value in numbers.items() if name not in OURS_ALONE}


def described(kind: Any) -> str:
    """A type of ctypes as the program describes those of C++: kind and size, behind `p:` for each pointer."""
    if kind is ctypes.c_void_p:
        return "p"
    if kind is ctypes.c_char_p:
        return "p:i1"
    if issubclass(kind, ctypes._Pointer):
        return f"p:{described(kind._type_)}"
    if issubclass(kind, ctypes.Structure):
        return f"s{ctypes.sizeof(kind)}"
    return f"{'i' if kind._type_.islower() else 'u'}{ctypes.sizeof(kind)}"


def agrees(ours: str, theirs: str) -> bool:
    """Whether one is passed as the other: an `int` for an enumeration, any pointer for an address or a known one."""
    if ours.startswith("p:") and theirs.startswith("p:"):
        return agrees(ours[2:], theirs[2:])
    return ours == theirs or (ours, theirs) in {("i4", "e4"), ("p", "u8")} or (ours == "p" and theirs.startswith("p:"))


def program() -> str:
    """What asks the headers for all that is compared."""
    types = {name: f"decltype(&{name})" for name in [*prototypes(), *(name for name, _ in CUFILE.values())]}
    lines = [f'say("symbol {name}", TEXT({name}));' for name in prototypes()]
    lines += [f'say("{name}", signature(static_cast<{theirs}>(nullptr)));' for name, theirs in types.items()]
    for name, theirs in BATCHED.items():
        line = f'say("{name}", signature(static_cast<{theirs}>(nullptr)));'
        lines.append(f"#if CUDA_VERSION >= {theirs[-5:]}\n{line}\n#endif")
    structures = {theirs: list(fields.values()) for theirs, fields in STRUCTURES.values()}
    structures["CUfileDescr_t"] = ["type", "handle", "fs_ops"]
    numbers = {f"sizeof({name})": f"sizeof({name})" for name in structures}
    numbers |= {f"{name}.{each}": f"offsetof({name}, {each})" for name, fields in structures.items() for each in fields}
    numbers |= {name: name for name in [*VALUES.values(), *MEANINGS]}
    lines += [f'say("{name}", std::to_string((long long)({number})));' for name, number in numbers.items()]
    return DESCRIBE + "\n".join(lines) + "\n}\n"


class Headers:
    """What one version of the headers says, and the symbols of its cuFile."""

    def __init__(self, version: str, scratch: Path) -> None:
        self.version = version
        where = environments.cuda_headers(version)
        source, binary = scratch / "headers.cpp", scratch / "headers"
        source.write_text(program())
        subprocess.run(["g++", "-std=c++17", "-w", f"-I{where / 'include'}", source, "-o", binary], check=True)
        said = subprocess.run([binary], check=True, capture_output=True, text=True).stdout
        self.said = dict(line.rsplit(" ", 1) for line in said.splitlines())
        (library,) = (where / "lib").glob("libcufile.so.*")
        listed = subprocess.run(["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True)
        self.symbols = {line.split()[-1].partition("@")[0] for line in listed.stdout.splitlines()}


@pytest.fixture(scope="module", params=list(environments.CUDA))
def headers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Headers:
    return Headers(request.param, tmp_path_factory.mktemp("headers"))


def signature(prototype: Any) -> list[str]:
    return [described(prototype._restype_), *map(described, prototype._argtypes_)]


def signature_said(text: str) -> list[str]:
    result, _, arguments = text.removesuffix(")").partition("(")
    return [result, *filter(None, arguments.split(","))]


def same(ours: list[str], theirs: list[str]) -> bool:
    return len(ours) == len(theirs) and all(map(agrees, ours, theirs))


def test_names_are_found_in_the_source() -> None:
    assert {"cuInit", "cuMemcpyAsync", "cuGetProcAddress_v2"} <= set(prototypes())
    assert set(values(driver)) == set(VALUES)
    structures = {
        each for each in vars(driver).values() if isinstance(each, type) and issubclass(each, ctypes.Structure)
    }
    assert structures == set(STRUCTURES)
    assert all({name for name, _ in kind._fields_} == set(fields) for kind, (_, fields) in STRUCTURES.items())
    text = inspect.getsource(CuFile)
    assert {name for name in CUFILE if f'"{name}"' in text} == set(CUFILE)
    used = {node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)}
    assert {name for name in used if isinstance(name, str) and callable(getattr(bindings, name, None))} == set(CUFILE)


def test_prototypes_of_the_driver(headers: Headers) -> None:
    for name, prototype in prototypes().items():
        ours = signature(getattr(driver, prototype))
        assert same(ours, signature_said(headers.said[name])), (headers.version, name, ours, headers.said[name])


def test_prototypes_of_the_batched_copy_by_version(headers: Headers) -> None:
    served = [name for name in BATCHED if name in headers.said]
    assert served == list(BATCHED)[: 1 if headers.version < "13" else 2]
    for name in served:
        ours = signature(getattr(driver, name))
        assert same(ours, signature_said(headers.said[name])), (headers.version, name, ours, headers.said[name])


def test_symbols_are_those_that_the_headers_stand_for(headers: Headers) -> None:
    for name in prototypes():
        assert headers.said[f"symbol {name}"] == name
    assert {name for name, _ in CUFILE.values()} <= headers.symbols


def test_structures(headers: Headers) -> None:
    for ours, (theirs, fields) in STRUCTURES.items():
        assert str(ctypes.sizeof(ours)) == headers.said[f"sizeof({theirs})"]
        for mine, its in fields.items():
            assert str(getattr(ours, mine).offset) == headers.said[f"{theirs}.{its}"]
    assert str(gds.DESCRIPTOR.size) == headers.said["sizeof(CUfileDescr_t)"]
    offsets = [headers.said[f"CUfileDescr_t.{name}"] for name in ("type", "handle", "fs_ops")]
    assert gds.DESCRIPTOR.format == "<i4xqq"
    assert offsets == ["0", "8", "16"]


def test_values(headers: Headers) -> None:
    for ours, theirs in VALUES.items():
        assert str(getattr(driver, ours)) == headers.said[theirs], ours
    for theirs, meaning in MEANINGS.items():
        assert str(meaning) == headers.said[theirs], theirs


def test_functions_of_cufile(headers: Headers) -> None:
    for name, expected in CUFILE.values():
        said = signature_said(headers.said[name])
        assert same(signature_said(expected), said), (headers.version, name, headers.said[name])


def test_a_wrong_prototype_structure_or_value_is_noticed(headers: Headers) -> None:
    said = signature_said(headers.said["cuMemcpyAsync"])
    assert not same(signature(ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)), said)
    swapped = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    assert not same(signature(ctypes.CFUNCTYPE(ctypes.c_int, *swapped)), said)
    assert headers.said["sizeof(CUmemcpyAttributes)"] != str(ctypes.sizeof(driver.MemLocation))
