"""Versions and hardware of the machine that runs vLLM, read without starting anything.

Owns: the `versions` and `hardware` groups of the configuration document.
Promises: standard library only; libraries are asked only when vLLM has already loaded them; what is not told is "unknown".
Talks to: package metadata, /proc, and vLLM's platform object when it is loaded.
"""

import hashlib
import importlib.metadata
import os
import platform
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path

from gateway.evidence.plain_json import Json

UNKNOWN = "unknown"
PACKAGES = ("vllm", "torch", "transformers", "tokenizers", "triton", "flashinfer-python", "xgrammar")
_GIB = 1024**3


def read_versions() -> dict[str, Json]:
    """Versions of vLLM, of the libraries that shape its speed, of CUDA and of Python; "none" for what is not installed."""
    found: dict[str, Json] = {name: _version(name) or "none" for name in PACKAGES}
    if found["vllm"] == "none":
        found["vllm"] = str(getattr(sys.modules.get("vllm"), "__version__", UNKNOWN))
    torch_version = getattr(sys.modules.get("torch"), "version", None)
    found["cuda"] = str(getattr(torch_version, "cuda", None) or "none") if torch_version is not None else UNKNOWN
    found["python"] = platform.python_version()
    return found


def read_hardware(devices: int | None) -> dict[str, Json]:
    """Device name, device count, memory and CPU, with `profile`, one line that names them all.

    `devices` is the number of accelerators the configuration uses (tensor x pipeline x data), None when not known.
    """
    kind, name, memory = _device()
    count: Json = devices if devices is not None else UNKNOWN
    facts: dict[str, Json] = {
        "device_type": kind,
        "device": name,
        "devices": count,
        "device_memory_gib": memory,
        "driver": _driver(),
        "cpu": _cpu_model(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else UNKNOWN,
        "machine": platform.machine() or UNKNOWN,
    }
    return {**facts, "profile": profile(facts)}


def profile(facts: Mapping[str, Json]) -> str:
    """`4 x NVIDIA H100 80GB HBM3 (79 GiB)` or `cpu: <model> x 2`; "unknown" when the device is not known."""
    if facts["device_type"] == "cpu":
        parts = (facts["cpu"], facts["cpus"])
        return UNKNOWN if UNKNOWN in parts else f"cpu: {facts['cpu']} x {facts['cpus']}"
    parts = (facts["device"], facts["devices"])
    return UNKNOWN if UNKNOWN in parts else f"{facts['devices']} x {facts['device']} ({facts['device_memory_gib']} GiB)"


def engine_start_id(api_processes: object) -> str:
    """32 hex digits that tell one start of the engine from the next, the same in each of its API processes.

    Several API processes are children of one launcher: its process id and start time, with the machine's boot id, name
    the start. A single one draws a random id. "unknown" when there are several and /proc does not tell.
    """
    if not isinstance(api_processes, int) or api_processes <= 1:
        return secrets.token_hex(16)
    boot = _lines("/proc/sys/kernel/random/boot_id")
    stat = "".join(_lines(f"/proc/{os.getppid()}/stat")).rpartition(")")[2].split()
    if not boot or len(stat) < 20:
        return UNKNOWN
    return hashlib.sha256(f"{boot[0]} {os.getppid()} {stat[19]}".encode()).hexdigest()[:32]


def _device() -> tuple[str, str, str]:
    """(kind, name, memory in whole GiB) from vLLM's platform object; "unknown" for what it does not tell."""
    current = getattr(sys.modules.get("vllm.platforms"), "current_platform", None)
    kind = getattr(current, "device_type", None) or UNKNOWN
    if current is None or kind == "cpu":
        return str(kind), "cpu" if kind == "cpu" else UNKNOWN, UNKNOWN
    nvml = getattr(sys.modules.get("vllm.third_party.pynvml"), "NVMLError", RuntimeError)
    try:
        return str(kind), str(current.get_device_name(0)), str(round(current.get_device_total_memory(0) / _GIB))
    except (AttributeError, NotImplementedError, RuntimeError, OSError, ValueError, nvml):
        return str(kind), UNKNOWN, UNKNOWN


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str:
    for line in _lines("/proc/driver/nvidia/version"):
        words = line.split()
        if "Module" in words and words.index("Module") + 1 < len(words):
            return words[words.index("Module") + 1]
    return "none" if Path("/proc").is_dir() else UNKNOWN


def _cpu_model() -> str:
    for line in _lines("/proc/cpuinfo"):
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "cpu model") and value.strip():
            return " ".join(value.split())
    return platform.processor() or UNKNOWN


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
