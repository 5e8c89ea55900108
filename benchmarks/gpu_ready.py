"""Whether tests and benchmarks of an NVIDIA GPU can run here; says what is missing, and how to get it."""

from __future__ import annotations

import ctypes
import importlib.util
import sys

_NEEDED = ("numpy", "triton", "pydantic", "xxhash", "typer", "rich", "prometheus_client", "pytest", "hypothesis")

# The newest CUDA that wheels of torch are built for, up to that of the driver.
_WHEELS = ((13000, "cu130"), (12080, "cu128"), (12060, "cu126"), (11080, "cu118"))


def driver_version() -> int | None:
    """Newest CUDA version that the driver serves, such as 13000; `None` where there is no driver."""
    version = ctypes.c_int()
    try:
        library = ctypes.CDLL("libcuda.so.1")
        return None if library.cuDriverGetVersion(ctypes.byref(version)) else version.value
    except (OSError, AttributeError):
        return None


def wheel_for(driver: int) -> str | None:
    """The name of the newest build of torch that `driver` serves; `None` where it is older than all of them.

    A driver serves every build of its own major version.
    """
    return next((name for version, name in _WHEELS if version // 1000 <= driver // 1000), None)


def why_no_gpu(cuda: str | None, driver: int | None) -> str:
    """Why torch, built for `cuda`, sees no CUDA device, and what to do."""
    built = f"torch is built for CUDA {cuda}" if cuda else "torch is built without CUDA"
    if driver is None:
        return f"torch sees no CUDA device: {built}, and there is no CUDA driver (libcuda.so.1) here"
    served = f"{driver // 1000}.{driver % 1000 // 10}"
    wheel = wheel_for(driver)
    if cuda is not None and int(cuda.split(".")[0]) <= driver // 1000:
        advice = "expected a device in nvidia-smi, and CUDA_VISIBLE_DEVICES unset"
    elif wheel is None:
        advice = "update the driver"
    else:
        advice = f"install a build of torch for {wheel}, or a newer driver"
    return f"torch sees no CUDA device: {built}, the driver serves CUDA {served}; {advice}"


def main() -> int:
    if importlib.util.find_spec("torch") is None:
        print(f"no torch for {sys.executable}: set GPU_PYTHON to a Python that has it", file=sys.stderr)
        return 1
    import torch

    if not torch.cuda.is_available():
        print(f"{why_no_gpu(torch.version.cuda, driver_version())}. Nothing was tested or measured.", file=sys.stderr)
        return 1
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"{sys.executable} lacks {', '.join(missing)}: run `make gpu-carry` where packages can be fetched, and "
            "take build/gpu-carry along",
            file=sys.stderr,
        )
        return 1
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
