"""The GPUs of a machine, as ``nvidia-smi`` knows them."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

__all__ = ["device_files", "gpus", "links_of"]

_DEVICES = "/dev"
_PATIENCE = 20.0  # seconds: without persistence mode a driver starts its devices first


def gpus() -> dict[str, Any] | None:
    """Driver, the newest CUDA that it can run, devices, and their links; None: there are none.

    Returns:
        ``unseen`` has the devices that the system has where there is no ``nvidia-smi`` to say more of them.
        ``error`` is text where nvidia-smi fails, such as a driver that does not fit it. Memory is in bytes. ``links``
        has a list for each device, of how it is linked to each: ``X`` is itself, ``NV18`` are 18 NVLinks, ``PIX``,
        ``PXB``, ``PHB``, ``NODE`` and ``SYS`` ways over PCIe, from the nearest to the farthest.
    """
    nothing: dict[str, Any] = {"driver": None, "cuda": None, "devices": [], "links": [], "error": "", "unseen": []}
    program = shutil.which("nvidia-smi")
    if program is None:
        unseen = device_files()
        return {**nothing, "unseen": unseen} if unseen else None
    try:
        text = _output(program, "-q", "-x")
        top = ET.fromstring(text)
    except (OSError, subprocess.SubprocessError, ET.ParseError) as error:
        wrote = getattr(error, "stdout", None) or getattr(error, "stderr", None) or error
        return {**nothing, "error": " ".join(str(wrote).split())[:300]}
    devices = [
        {
            "name": each.findtext("product_name", "?"),
            "memory": _bytes(each.findtext("fb_memory_usage/total", "")),
            "used": _bytes(each.findtext("fb_memory_usage/used", "")),
            "mode": each.findtext("compute_mode", ""),
            "mig": each.findtext("mig_mode/current_mig", ""),
        }
        for each in top.findall("gpu")
    ]
    links: list[list[str]] = []
    if len(devices) > 1:
        try:
            links = links_of(_output(program, "topo", "-m"), len(devices))
        except (OSError, subprocess.SubprocessError):
            links = []
    found = {"driver": top.findtext("driver_version"), "cuda": top.findtext("cuda_version")}
    return {**nothing, **found, "devices": devices, "links": links}


def device_files() -> list[str]:
    """The files of this system's GPUs, such as ``/dev/nvidia0``."""
    return sorted(map(str, Path(_DEVICES).glob("nvidia[0-9]*")))


def links_of(text: str, count: int) -> list[list[str]]:
    """The links of as many devices in what ``nvidia-smi topo -m`` prints; empty: they are not in it.

    >>> links_of("        GPU0    GPU1    NIC0\\nGPU0     X      NV18    PXB\\nGPU1    NV18     X      SYS\\n", 2)
    [['X', 'NV18'], ['NV18', 'X']]
    """
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    rows = [line.split() for line in plain.splitlines()]
    found = [row[1 : count + 1] for row in rows if row and re.fullmatch(r"GPU\d+", row[0]) and "X" in row]
    return found if len(found) == count and all(len(row) == count for row in found) else []


def _output(*command: str) -> str:
    run = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_PATIENCE, check=True)
    return run.stdout


def _bytes(text: str) -> int | None:
    """Of a size such as ``81559 MiB``."""
    found = re.match(r"(\d+) MiB", text)
    return int(found[1]) << 20 if found else None
