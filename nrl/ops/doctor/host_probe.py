"""Examine a host, this one or another: its uv, its environments, its torch, the hub, its sandbox.

The module travels by value (`nrl.runtime.ray.nodes.send_by_value`), and needs the standard library alone: a node's
Python need not have nrl. `nrl.ops.doctor.installation` and `service_checks` judge the results.
"""

import json
import os
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nrl.runtime.node.gpus import list_device_files
from nrl.runtime.node.machine import find_python_with_torch, list_folders
from nrl.runtime.venvs.environments import INVENTORY, default_folder, list_inventories
from nrl.runtime.venvs.inspection import list_wrong_packages
from nrl.runtime.venvs.installer import find_uv

__all__ = ["look_at_environments", "look_at_host", "look_at_hub", "look_at_torch", "look_at_uv"]

_PATIENCE = 120.0  # seconds in which torch is imported, from a slow disk, too
_HUB = 4.0  # seconds for an answer of the hub
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
_SANDBOX = ("bwrap", "prlimit", "setpriv")  # the programs that a sandbox is made with

_TORCH = """
import ctypes, importlib.util, json, pathlib, runpy, sys, warnings

def libraries():
    folder = pathlib.Path(importlib.util.find_spec("torch").submodule_search_locations[0])
    ctypes.CDLL(str(folder / "lib" / "libtorch_python.so"))  # and all that it needs, with every symbol
    about = runpy.run_path(str(folder / "version.py"))
    return {"version": about["__version__"], "cuda": about["cuda"], "hip": about["hip"], "devices": 0, "said": []}

def imported():
    found = {}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        import torch
        import torch.distributed as dist
        found |= {"version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip}
        found |= {"gloo": dist.is_available() and dist.is_gloo_available(), "nccl": None}
        found["devices"] = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if found["devices"]:
            found["capabilities"] = ["%d%d" % torch.cuda.get_device_capability(i) for i in range(found["devices"])]
            found["built_for"] = torch.cuda.get_arch_list()
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else None
        elif sys.argv[1] == "gpus":
            try:
                torch.cuda.init()
            except Exception as error:
                found["why"] = str(error)
    found["said"] = [str(each.message) for each in said]
    return found

found = None
if sys.argv[1] != "gpus":
    try:
        found = libraries()
    except Exception:  # a build of another kind, or one that its import alone mends: that decides
        pass
print(json.dumps(found or imported()))
"""


def look_at_host(ray: str, executables: Collection[str]) -> dict[str, Any]:
    """Examine this host beside its hardware, by subject; ``error`` if an examination itself fails.

    Args:
        ray: the version of Ray that a Python with torch should have.
        executables: whose environments are looked at.
    """

    def torch() -> dict[str, Any]:
        python, gpus = find_python_with_torch(ray), shutil.which("nvidia-smi") is not None or bool(list_device_files())
        # Ray hides all GPUs from a task that asks for none
        return {"python": python, **(look_at_torch(python, gpus, hidden=False) if python else {})}

    looks: dict[str, Callable[[], dict[str, Any]]] = {
        "uv": look_at_uv,
        "environments": lambda: look_at_environments(executables),
        "hub": look_at_hub,
        "sandbox": _look_at_sandbox,
        "torch": torch,
    }
    with ThreadPoolExecutor(len(looks)) as threads:
        futures = {name: threads.submit(_run_guarded, fn) for name, fn in looks.items()}
        return {name: future.result() for name, future in futures.items()}


def _run_guarded(fn: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return fn()
    except Exception as error:  # An error of one examination must not hide the others.
        return {"error": f"{type(error).__name__}: {error}"}


def look_at_uv() -> dict[str, Any]:
    """``version`` and ``command`` of this host's uv; ``error`` alone where there is none that runs."""
    try:
        command = find_uv()
        run = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60, check=True)
        return {"version": run.stdout.split()[1], "command": command}
    except Exception as error:  # without nrl it is another one than with nrl
        return {"error": str(error)}


def look_at_environments(executables: Collection[str], folder: Path | None = None) -> dict[str, Any]:
    """Examine the environments of this host.

    Args:
        executables: whose; others are left out.
        folder: that they are in; None: `nrl.runtime.venvs.environments.default_folder`.

    Returns:
        ``folder``, whether it is ``writable``; ``whole``: the inventory of each environment, with ``wrong``, in what
        its packages differ from that; ``begun``: names of half-built ones; ``sources``: names of those beside them.
    """
    folder = folder or default_folder()
    envs = {env: entry for env, entry in list_inventories(folder).items() if entry["executable"] in executables}
    return {
        "folder": str(folder),
        "writable": os.access(folder, os.W_OK),
        "whole": [{**entry, "wrong": list(list_wrong_packages(env, entry))} for env, entry in envs.items()],
        "begun": sorted(entry.name for entry in folder.glob(".*.building")),
        "sources": sorted(entry.name for entry in folder.glob(".sources/*") if (entry / INVENTORY).is_file()),
    }


def look_at_hub() -> dict[str, Any]:
    """Examine the hub of models: whether it answers, its folder, and whether there is a token, which stays secret."""
    home = str(list_folders()["hub"])
    endpoint = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    offline = [name for name in _OFFLINE if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")]
    facts = {"home": home, "token": _has_token(home), "endpoint": endpoint, "offline": offline}
    if offline:
        return {**facts, "reached": None, "why": ""}
    try:
        with urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=_HUB):
            pass
    except urllib.error.HTTPError:  # it answers
        pass
    except (OSError, ValueError) as error:
        return {**facts, "reached": False, "why": str(getattr(error, "reason", error))}
    return {**facts, "reached": True, "why": ""}


def _has_token(home: str) -> bool:
    if os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN"):
        return True
    try:
        return bool(Path(os.environ.get("HF_TOKEN_PATH") or f"{home}/token").expanduser().read_text().strip())
    except OSError:
        return False


def _look_at_sandbox() -> dict[str, Any]:
    """Return why no sandbox can be made here; empty: a minimal one runs."""
    lacking = [name for name in _SANDBOX if shutil.which(name) is None]
    if lacking:
        return {"why": f"there is no {' and no '.join(lacking)}"}
    command = ["bwrap", "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "true"]
    run = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=20)
    return {"why": "" if run.returncode == 0 else run.stderr.strip()[-200:] or f"exit status {run.returncode}"}


def look_at_torch(python: str, gpus: bool, patience: float = _PATIENCE, *, hidden: bool = True) -> dict[str, Any]:
    """Examine an interpreter's torch and its devices in a process of its own: the import takes seconds.

    Args:
        python: the interpreter.
        gpus: whether there are some. Without, torch is not imported: its libraries are loaded, and its version is read.
        patience: seconds for the answer.
        hidden: leave hidden what CUDA_VISIBLE_DEVICES hides.

    Returns:
        ``error`` alone where torch cannot be imported.
    """
    environ = {name: value for name, value in os.environ.items() if hidden or name != "CUDA_VISIBLE_DEVICES"}
    command = [python, "-c", _TORCH, "gpus" if gpus else "none"]
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=patience, env=environ, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"it did not end within {patience:g} s"}
    if run.returncode:
        last = (run.stderr.strip() or f"exit status {run.returncode}").splitlines()[-1]
        return {"error": last}
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return {**result, "chosen": environ.get("CUDA_VISIBLE_DEVICES")}
