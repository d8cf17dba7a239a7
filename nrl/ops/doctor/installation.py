"""Checks of what is installed on this host: Python, uv, packages against the lock, torch, environments."""

import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from nrl.errors import NrlError
from nrl.ops.doctor.findings import Check, Finding, failed, note, ok, warning
from nrl.ops.doctor.host_probe import look_at_environments, look_at_torch, look_at_uv
from nrl.runtime.node.machine import Facts
from nrl.runtime.venvs.environments import DISTRIBUTION, Recipe, default_folder, describe_difference, measure_similarity
from nrl.runtime.venvs.locks import find_project, select_pins
from nrl.runtime.venvs.pylock import Pin
from nrl.runtime.venvs.recipes import make_recipe
from nrl.runtime.venvs.registry import EXECUTABLES

__all__ = [
    "INSTALLATION",
    "environments",
    "environments_judged",
    "lock",
    "python",
    "too_old",
    "torch",
    "torch_judged",
    "torch_to_come",
    "uv_judged",
]

_MOST = 6  # packages that a line names
_SYNC = "run `uv sync --locked` in the project, or install these versions"


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
    found, there, of = look_at_uv(), _installed(), find_project()
    pins: Mapping[str, Pin] = {}
    why = ""
    try:
        pins = select_pins(EXECUTABLES["base"], of, default_folder() / ".resolved")
    except (NrlError, OSError) as error:
        why = str(error)
    wanted = {name: pin.version for name, pin in pins.items() if pin.path is None and pin.version}
    yield from _needed(there)
    yield uv_judged(found, wanted.get("uv"))
    whose = {"checkout": "nrl's checkout", "project": "the project", "wheel": "the installed nrl"}[of.kind]
    if why:
        yield failed("lock", f"{of.root}: {why}", "mend the lock (`uv lock`): environments are built from it")
        return
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


def uv_judged(found: Mapping[str, Any], wanted: str | None) -> Finding:
    """Whether a host's uv is that of the lock.

    Args:
        found: `look_at_uv` of the host.
        wanted: the version that the lock has, if that is known.
    """
    if "error" in found:
        more = "install it: `python -m pip install uv`. Without it no environment can be built"
        return failed("uv", str(found["error"]), more)
    version, said = found["version"], f"{found['version']}, {' '.join(found['command'])}"
    if wanted in (None, version):
        return ok("uv", said, version=version)
    more = f"{_SYNC}: another uv may not find what this one has in its cache, and fetches packages again"
    return warning("uv", f"{said}; the lock has {wanted}", more, version=version, locked=wanted)


def torch(facts: Facts) -> Iterator[Finding]:
    """Whether torch can be imported, and sees the GPUs that there are; without GPUs, whether its libraries load."""
    yield from torch_judged(look_at_torch(sys.executable, facts["gpus"] is not None), facts["gpus"])


def torch_judged(found: Mapping[str, Any], gpus: Mapping[str, Any] | None) -> Iterator[Finding]:
    """Whether a host's torch can be imported, and sees its GPUs.

    Args:
        found: `look_at_torch` of the host.
        gpus: what nvidia-smi says there; None: there is none.
    """
    if "error" in found:
        again = f"{_SYNC}; `nrl venvs check` for environments"
        yield failed("torch", f"it cannot be imported: {found['error']}", again)
        return
    kind = f"CUDA {found['cuda']}" if found["cuda"] else f"ROCm {found['hip']}" if found["hip"] else "CPUs alone"
    said, count = f"{found['version']}, built for {kind}", len(gpus["devices"] or gpus["unseen"]) if gpus else 0
    if gpus is None or not count or found["devices"] == count:
        yield ok("torch", said + (f", sees {count} GPU(s); NCCL {found['nccl']}" if count else ""), **found)
    elif found["devices"]:
        chosen = found["chosen"]
        why = f"CUDA_VISIBLE_DEVICES is {chosen}" if chosen is not None else "CUDA_VISIBLE_DEVICES is not set"
        yield note("torch", f"{said}, sees {found['devices']} of {count} GPUs: {why}", **found)
    elif too_old(gpus, found["cuda"]):
        yield failed(
            "torch",
            f"{said}; driver {gpus['driver']} runs CUDA {gpus['cuda']} at most, so torch sees none of {count} GPU(s)",
            _newer(gpus, found["cuda"]),
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


def torch_to_come(gpus: Mapping[str, Any] | None, build: Mapping[str, Any], ray: str) -> Finding:
    """What the driver of a host without any torch is to the torch that environments there will have.

    Args:
        gpus: what nvidia-smi says there; None: there is none.
        build: `look_at_torch` of the program, whose lock environments are built from.
        ray: the version of Ray that a Python with torch should have.
    """
    said, more = f"no Python here has torch and Ray {ray}", "`nrl venvs build base` there, or let the next run build it"
    if gpus is None or not gpus["devices"] or not build.get("cuda"):
        return note("torch", said, more)
    if too_old(gpus, build["cuda"]):
        less = f"{said}; the program's is built for CUDA {build['cuda']}, and driver {gpus['driver']} runs CUDA "
        return failed("torch", f"{less}{gpus['cuda']} at most", _newer(gpus, build["cuda"]), cuda=build["cuda"])
    return note("torch", f"{said}; driver {gpus['driver']} runs the program's, for CUDA {build['cuda']}", more)


def too_old(gpus: Mapping[str, Any], cuda: str | None) -> bool:
    """Whether a driver is too old for what is built for a CUDA: it runs all of its own major version.

    >>> [too_old({"cuda": "12.4"}, built) for built in ("12.8", "13.0", None)], too_old({"cuda": None}, "13.0")
    ([False, True, False], False)
    """
    return bool(cuda and gpus["cuda"]) and Version(gpus["cuda"]).major < Version(str(cuda)).major


def _newer(gpus: Mapping[str, Any], cuda: str) -> str:
    return (
        f"install a driver for CUDA {cuda}, or one of NVIDIA's cuda-compat packages, or lock a torch that "
        f"is built for CUDA {gpus['cuda']}"
    )


def environments(facts: Facts) -> Iterator[Finding]:
    """Whether executables have their environments, whole and as the lock says."""
    yield from environments_judged(look_at_environments(EXECUTABLES), make_recipe)


def environments_judged(found: Mapping[str, Any], wanted: Callable[[str], Recipe]) -> Iterator[Finding]:
    """Whether a host's environments are whole, and what the lock of this process says.

    Args:
        found: `look_at_environments` of the host.
        wanted: what the environment of an executable should be.
    """
    folder, whole = found["folder"], {each["name"]: each for each in found["whole"]}
    for name in sorted({each["executable"] for each in whole.values()}):
        build = f"`nrl venvs build {name}`"
        try:
            made = wanted(name)
        except NrlError as error:
            yield warning("environments", f"{name}: {error}", f"mend that, then {build}", executable=name)
            continue
        if (there := whole.get(made.name)) is None:
            others = [each for each in whole.values() if each["executable"] == name]
            nearest = max(others, key=lambda each: measure_similarity(each, made.inventory))
            yield warning(
                "environments",
                f"{made.name} is not in {folder}, which has {nearest['name']}, built {nearest['built']}; to what the "
                f"lock of {find_project().root} says it differs by {describe_difference(nearest, made.inventory)}",
                f"{build}, or let the next run build it; or go back to the lock that the other one was made from",
                executable=name,
            )
        elif wrong := there["wrong"]:
            again = f"`NRL_FORCE_REBUILD_VENVS=1 nrl venvs build {name}` builds it again"
            yield warning("environments", f"{made.name}: {_few(wrong)}", again, executable=name, wrong=wrong)
        elif not found["writable"] and (lacking := sorted(set(made.sources) - set(found["sources"]))):
            less = f"{made.name} is complete, but {folder} has no {lacking[0]} beside it, and cannot be written"
            more = "a program that starts would put the source there: set NRL_VENV_DIR to a folder that can be written"
            yield warning("environments", less, f"{more}, or go back to the source in it", executable=name)
        else:
            yield ok("environments", f"{made.name} is complete, and is what the lock says", executable=name)
    if not whole:
        yield note(
            "environments",
            f"none in {folder}: the first mesh of an executable builds one, which takes minutes without a cache",
            "`nrl venvs build base` builds one before",
        )
    if begun := found["begun"]:
        left = "`nrl venvs prune` removes them, unless a builder is at work"
        yield note("environments", f"{len(begun)} incomplete in {folder}, such as {begun[0]}", left)


def _needed(there: Mapping[str, str]) -> Iterator[Finding]:
    """What nrl itself asks for, whatever the lock says."""
    wrong = list[str]()
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
        return [str(each) for each in metadata.metadata(DISTRIBUTION).get_all(key, [])]
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
