"""Checks of what is installed on this host: Python, uv, packages against the lock, torch, environments."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from nrl.errors import NrlError
from nrl.runtime.doctor.findings import Check, Finding, failed, note, ok, warning
from nrl.runtime.executables import maintenance
from nrl.runtime.executables.locks import locked, project
from nrl.runtime.executables.registry import EXECUTABLES
from nrl.runtime.node.environments import default_folder, inventories
from nrl.runtime.node.installer import find_uv
from nrl.runtime.node.machine import Facts

__all__ = ["INSTALLATION", "environments", "lock", "look_at_torch", "python", "torch"]

_MOST = 6  # packages that a line names
_SYNC = "run `uv sync --locked` in the project, or install these versions"
_PATIENCE = 120.0  # seconds in which torch is imported, from a slow disk, too

_TORCH = """
import json, sys, warnings
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
    elif len(sys.argv) > 1:
        try:
            torch.cuda.init()
        except Exception as error:
            found["why"] = str(error)
found["said"] = [str(each.message) for each in said]
print(json.dumps(found))
"""


def python(facts: Facts) -> Iterator[Finding]:
    """Whether nrl runs on this Python."""
    found, wanted = facts["python"], ",".join(_metadata("Requires-Python"))
    said = f"{found}, {facts['executable']}"
    if wanted and not SpecifierSet(wanted).contains(found, prereleases=True):
        yield failed("python", f"{said}; nrl needs {wanted}", "make an environment: `uv venv --python 3.12`, `uv sync`")
    else:
        yield ok("python", said, version=found)


def lock(facts: Facts) -> Iterator[Finding]:
    """Whether uv and the packages of this interpreter are those of the lock, and those that nrl needs."""
    version = ""
    try:
        command = find_uv()
        run = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60, check=True)
        version = run.stdout.split()[1]
    except NrlError as error:
        yield failed("uv", str(error), "install it: `python -m pip install uv`. Without it no environment can be built")
    yield from _needed()
    of = project()
    whose = {"checkout": "nrl's checkout", "project": "the project", "wheel": "the installed nrl"}[of.kind]
    try:
        pins = locked(EXECUTABLES["base"], of, default_folder() / ".resolved")
    except (NrlError, OSError) as error:
        if version:
            yield ok("uv", version, version=version)
        yield failed("lock", f"{of.root}: {error}", "mend the lock (`uv lock`): environments are built from it")
        return
    there = _installed()
    wanted = {name: pin.version for name, pin in pins.items() if pin.path is None and pin.version}
    if version and wanted.get("uv", version) != version:
        yield warning(
            "uv",
            f"{version}, {' '.join(command)}; the lock has {wanted['uv']}",
            f"{_SYNC}: another uv may not find what this one has in its cache, and fetches packages again",
            version=version,
            locked=wanted["uv"],
        )
    elif version:
        yield ok("uv", f"{version}, {' '.join(command)}", version=version)
    wrong = [
        f"{name} {there.get(name, 'is missing')}" + (f" instead of {version}" if name in there else "")
        for name, version in sorted(wanted.items())
        if there.get(name) != version
    ]
    said = f"{whose}, {of.root}, with {len(wanted)} packages"
    if wrong:
        differ = f"{said}; here {_few(wrong)}"
        yield warning("lock", differ, f"{_SYNC}; executables but `system` have the lock's anyway", differing=wrong)
    else:
        yield ok("lock", f"{said}, which are all here in its versions", differing=[])


def torch(facts: Facts) -> Iterator[Finding]:
    """Whether torch can be imported, and sees the GPUs that there are."""
    gpus = facts["gpus"]
    found = look_at_torch(sys.executable, gpus is not None)
    if "error" in found:
        yield failed(
            "torch", f"it cannot be imported: {found['error']}", f"{_SYNC}; `nrl venvs check` for environments"
        )
        return
    kind = f"CUDA {found['cuda']}" if found["cuda"] else f"ROCm {found['hip']}" if found["hip"] else "CPUs alone"
    said, count = f"{found['version']}, built for {kind}", len(gpus["devices"]) if gpus else 0
    if not count or found["devices"] == count:
        yield ok("torch", said + (f", sees {count} GPU(s); NCCL {found['nccl']}" if count else ""), **found)
    elif found["devices"]:
        chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = f"CUDA_VISIBLE_DEVICES is {chosen}" if chosen is not None else "CUDA_VISIBLE_DEVICES is not set"
        yield note("torch", f"{said}, sees {found['devices']} of {count} GPUs: {why}", **found)
    elif found["cuda"] and gpus["cuda"] and Version(gpus["cuda"]).major < Version(found["cuda"]).major:
        yield failed(
            "torch",
            f"{said}; driver {gpus['driver']} runs CUDA {gpus['cuda']} at most, so torch sees none of {count} GPU(s)",
            f"install a driver for CUDA {found['cuda']}, or one of NVIDIA's cuda-compat packages, or lock a torch that "
            f"is built for CUDA {gpus['cuda']}",
            **found,
        )
    else:
        why = found.get("why") or "; ".join(found["said"]) or f"it is built for {kind}"
        yield failed(
            "torch",
            f"{said}, sees none of {count} GPU(s): {why}",
            "install torch's build for CUDA, let CUDA_VISIBLE_DEVICES name them, and look for an Xid in `dmesg`",
            **found,
        )
    built = set(found.get("built_for", ()))
    foreign = sorted({each for each in found.get("capabilities", ()) if not _runs(each, built)})
    if foreign:
        less = f"this torch is built for {', '.join(sorted(built))}, and a GPU here is sm_{foreign[0]}"
        yield failed("torch", less, "lock a torch that is built for it", foreign=foreign)


def environments(facts: Facts) -> Iterator[Finding]:
    """Whether executables have their environments, whole and as the lock says: what ``nrl venvs check`` says."""
    folder = default_folder()
    there = sorted({each["executable"] for each in inventories(folder).values()} & set(EXECUTABLES))
    for name in there:
        said = list[str]()
        try:
            well = maintenance.check([name], folder=folder, say=said.append)
        except NrlError as error:
            well, said = False, [str(error)]
        if well:
            yield ok("environments", said[0], executable=name)
        else:
            found, _, todo = (
                said[0].rpartition("; build it again") if "build it again" in said[0] else (said[0], "", "")
            )
            again = f"build it again{todo}" if todo else f"`nrl venvs build {name}`, or let the next run build it"
            yield warning("environments", found, again, executable=name)
    if not there:
        yield note(
            "environments",
            f"none in {folder}: the first mesh of an executable builds one, which takes minutes without a cache",
            "`nrl venvs build base` builds one before",
        )
    if begun := sorted(folder.glob(".*.building")):
        left = "`nrl venvs prune` removes them, unless a builder is at work"
        yield note("environments", f"{len(begun)} incomplete in {folder}, such as {begun[0].name}", left)


def look_at_torch(python: str, gpus: bool, patience: float = _PATIENCE) -> dict[str, Any]:
    """What an interpreter's torch is and sees, asked in a process of its own: to import it takes seconds.

    Args:
        python: the interpreter.
        gpus: whether there are some, so that it is said why torch sees none.
        patience: seconds for the answer.

    Returns:
        ``error`` alone where torch cannot be imported.
    """
    command = [python, "-c", _TORCH, *(["why"] if gpus else [])]
    try:
        run = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=patience)
    except subprocess.TimeoutExpired:
        return {"error": f"it did not end within {patience:g} s"}
    if run.returncode:
        last = (run.stderr.strip() or f"exit status {run.returncode}").splitlines()[-1]
        return {"error": last}
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def _needed() -> Iterator[Finding]:
    """What nrl itself asks for, whatever the lock says."""
    there, wrong = _installed(), list[str]()
    for text in _metadata("Requires-Dist"):
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        version = there.get(canonicalize_name(wanted.name))
        if version is None or not wanted.specifier.contains(version, prereleases=True):
            wrong.append(f"{wanted} ({'missing' if version is None else version})")
    if wrong:
        yield failed("lock", f"nrl needs {_few(wrong)}", _SYNC, needed=wrong)


def _metadata(key: str) -> list[str]:
    """What nrl's package says of itself; nothing where nrl was not installed, but lies on the path."""
    try:
        return [str(each) for each in metadata.metadata("nrl").get_all(key, [])]
    except metadata.PackageNotFoundError:
        return []


def _few(names: list[str]) -> str:
    return ", ".join([*names[:_MOST], *([f"and {len(names) - _MOST} more"] if len(names) > _MOST else [])])


def _installed() -> Mapping[str, str]:
    found = [(each.metadata["Name"], each.version) for each in metadata.distributions()]
    return {canonicalize_name(name): version for name, version in reversed(found) if name}


def _runs(capability: str, built: set[str]) -> bool:
    """Whether code for one of these architectures runs on a device: of its generation, or compiled there (PTX).

    >>> _runs("86", {"sm_80"}), _runs("121", {"sm_80", "compute_90"}), _runs("70", {"sm_80", "compute_80"})
    (True, True, False)
    """
    own = int(capability)
    for each in built:
        kind, _, text = each.partition("_")
        number = int(text.rstrip("af"))
        if number <= own and (kind == "compute" or number // 10 == own // 10):
            return True
    return False


INSTALLATION: tuple[Check, ...] = (python, lock, environments)
"""The checks of what is installed, but for `torch`, which takes the longest; in the order in which they are shown."""
