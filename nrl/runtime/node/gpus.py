"""The GPUs of a machine, as ``nvidia-smi`` knows them."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

__all__ = ["inspect_gpus", "list_device_files", "parse_links"]

_DEVICES = "/dev"
_PATIENCE = 20.0  # seconds: without persistence mode a driver starts its devices first


def inspect_gpus() -> dict[str, Any] | None:
    """Return the driver, the newest CUDA that it can run, devices, and their links; None: there are no GPUs.

    Returns:
        ``unseen`` lists device files on a system without ``nvidia-smi``. ``error`` is a text if nvidia-smi fails, such
        as for a driver of another version. Memory is in bytes. ``links`` has a list for each device, of its link to
        each: ``X`` is the device itself, ``NV18`` are 18 NVLinks; ``PIX``, ``PXB``, ``PHB``, ``NODE`` and ``SYS`` are
        links over PCIe, from the nearest to the farthest.
    """
    empty: dict[str, Any] = {"driver": None, "cuda": None, "devices": [], "links": [], "error": "", "unseen": []}
    program = shutil.which("nvidia-smi")
    if program is None:
        unseen = list_device_files()
        return {**empty, "unseen": unseen} if unseen else None
    try:
        text = _run(program, "-q", "-x")
        top = ET.fromstring(text)
    except (OSError, subprocess.SubprocessError, ET.ParseError) as error:
        wrote = getattr(error, "stdout", None) or getattr(error, "stderr", None) or error
        return {**empty, "error": " ".join(str(wrote).split())[:300]}
    devices = [
        {
            "name": gpu.findtext("product_name", "?"),
            "memory": _parse_bytes(gpu.findtext("fb_memory_usage/total", "")),
            "used": _parse_bytes(gpu.findtext("fb_memory_usage/used", "")),
            "mode": gpu.findtext("compute_mode", ""),
            "mig": gpu.findtext("mig_mode/current_mig", ""),
        }
        for gpu in top.findall("gpu")
    ]
    links: list[list[str]] = []
    if len(devices) > 1:
        try:
            links = parse_links(_run(program, "topo", "-m"), len(devices))
        except (OSError, subprocess.SubprocessError):
            links = []
    versions = {"driver": top.findtext("driver_version"), "cuda": top.findtext("cuda_version")}
    return {**empty, **versions, "devices": devices, "links": links}


def list_device_files() -> list[str]:
    """Return the files of this system's GPUs, such as ``/dev/nvidia0``."""
    return sorted(map(str, Path(_DEVICES).glob("nvidia[0-9]*")))


def parse_links(text: str, count: int) -> list[list[str]]:
    """Parse the links of ``count`` devices from the output of ``nvidia-smi topo -m``; empty: they are not in it.

    >>> parse_links("        GPU0    GPU1    NIC0\\nGPU0     X      NV18    PXB\\nGPU1    NV18     X      SYS\\n", 2)
    [['X', 'NV18'], ['NV18', 'X']]
    """
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    rows = [line.split() for line in plain.splitlines()]
    links = [row[1 : count + 1] for row in rows if row and re.fullmatch(r"GPU\d+", row[0]) and "X" in row]
    return links if len(links) == count and all(len(row) == count for row in links) else []


def _run(*command: str) -> str:
    run = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_PATIENCE, check=True)
    return run.stdout


def _parse_bytes(text: str) -> int | None:
    """Parse a size such as ``81559 MiB``."""
    match = re.match(r"(\d+) MiB", text)
    return int(match[1]) << 20 if match else None
