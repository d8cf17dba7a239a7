"""Checks of the installation on this host: Python, uv, packages against the lock, torch, environments."""

import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from nrl.errors import NrlError
from nrl.ops.doctor.findings import Check, Finding, make_failure, make_note, make_ok, make_warning
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
    "is_driver_too_old",
    "judge_environments",
    "judge_future_torch",
    "judge_torch",
    "judge_uv",
    "lock",
    "python",
    "torch",
]

_MAX_NAMED = 6  # packages that a line names
_SYNC = "run `uv sync --locked` in the project, or install these versions"


def python(facts: Facts) -> Iterator[Finding]:
    """Check that nrl runs on this Python."""
    version, required = facts["python"], ",".join(_read_metadata("Requires-Python"))
    message = f"{version}, {facts['executable']}"
    if required and not SpecifierSet(required).contains(version, prereleases=True):
        yield make_failure(
            "python", f"{message}; nrl needs {required}", "make an environment: `uv venv --python 3.12`, `uv sync`"
        )
    else:
        yield make_ok("python", message, version=version)


def lock(facts: Facts) -> Iterator[Finding]:
    """Check uv and the packages of this interpreter against the lock, and against nrl's requirements."""
    uv_facts, installed, lock_project = look_at_uv(), _list_installed(), find_project()
    pins: Mapping[str, Pin] = {}
    reason = ""
    try:
        pins = select_pins(EXECUTABLES["base"], lock_project, default_folder() / ".resolved")
    except (NrlError, OSError) as error:
        reason = str(error)
    versions = {name: pin.version for name, pin in pins.items() if pin.path is None and pin.version}
    yield from _check_requirements(installed)
    yield judge_uv(uv_facts, versions.get("uv"))
    owner = {"checkout": "nrl's checkout", "project": "the project", "wheel": "the installed nrl"}[lock_project.kind]
    if reason:
        yield make_failure(
            "lock", f"{lock_project.root}: {reason}", "mend the lock (`uv lock`): environments are built from it"
        )
        return
    wrong = [
        f"{name} {installed.get(name, 'is missing')}" + (f" instead of {version}" if name in installed else "")
        for name, version in sorted(versions.items())
        if installed.get(name) != version
    ]
    message = f"{owner}, {lock_project.root}, with {len(versions)} packages"
    if wrong:
        difference = f"{message}; here {_list_few(wrong)}"
        yield make_warning(
            "lock", difference, f"{_SYNC}; executables but `system` have the lock's anyway", differing=wrong
        )
    else:
        yield make_ok("lock", f"{message}, which are all here in its versions", differing=[])


def judge_uv(uv_facts: Mapping[str, Any], locked_version: str | None) -> Finding:
    """Judge whether a host's uv has the lock's version.

    Args:
        uv_facts: `look_at_uv` of the host.
        locked_version: the version that the lock has, if that is known.
    """
    if "error" in uv_facts:
        advice = "install it: `python -m pip install uv`. Without it no environment can be built"
        return make_failure("uv", str(uv_facts["error"]), advice)
    version, message = uv_facts["version"], f"{uv_facts['version']}, {' '.join(uv_facts['command'])}"
    if locked_version in (None, version):
        return make_ok("uv", message, version=version)
    advice = f"{_SYNC}: another uv may not find what this one has in its cache, and fetches packages again"
    return make_warning(
        "uv", f"{message}; the lock has {locked_version}", advice, version=version, locked=locked_version
    )


def torch(facts: Facts) -> Iterator[Finding]:
    """Check that torch can be imported and sees the GPUs; without GPUs, that its libraries load."""
    yield from judge_torch(look_at_torch(sys.executable, facts["gpus"] is not None), facts["gpus"])


def judge_torch(torch_facts: Mapping[str, Any], gpus: Mapping[str, Any] | None) -> Iterator[Finding]:
    """Judge whether a host's torch can be imported, and sees its GPUs.

    Args:
        torch_facts: `look_at_torch` of the host.
        gpus: what nvidia-smi says there; None: there is none.
    """
    if "error" in torch_facts:
        advice = f"{_SYNC}; `nrl venvs check` for environments"
        yield make_failure("torch", f"it cannot be imported: {torch_facts['error']}", advice)
        return
    rocm = f"ROCm {torch_facts['hip']}" if torch_facts["hip"] else "CPUs alone"
    kind = f"CUDA {torch_facts['cuda']}" if torch_facts["cuda"] else rocm
    message, count = (
        f"{torch_facts['version']}, built for {kind}",
        len(gpus["devices"] or gpus["unseen"]) if gpus else 0,
    )
    if gpus is None or not count or torch_facts["devices"] == count:
        yield make_ok(
            "torch", message + (f", sees {count} GPU(s); NCCL {torch_facts['nccl']}" if count else ""), **torch_facts
        )
    elif torch_facts["devices"]:
        chosen = torch_facts["chosen"]
        reason = f"CUDA_VISIBLE_DEVICES is {chosen}" if chosen is not None else "CUDA_VISIBLE_DEVICES is not set"
        yield make_note("torch", f"{message}, sees {torch_facts['devices']} of {count} GPUs: {reason}", **torch_facts)
    elif is_driver_too_old(gpus, torch_facts["cuda"]):
        yield make_failure(
            "torch",
            f"{message}; driver {gpus['driver']} runs CUDA {gpus['cuda']} at most, so torch sees none of "
            f"{count} GPU(s)",
            _advise_driver(gpus, torch_facts["cuda"]),
            **torch_facts,
        )
    else:
        reason = torch_facts.get("why") or "; ".join(torch_facts["said"]) or f"it is built for {kind}"
        yield make_failure(
            "torch",
            f"{message}, sees none of {count} GPU(s): {reason}",
            "install torch's build for CUDA, let CUDA_VISIBLE_DEVICES name them, and look for an Xid in `dmesg`",
            **torch_facts,
        )
    built = set(torch_facts.get("built_for", ()))
    foreign = sorted(
        {capability for capability in torch_facts.get("capabilities", ()) if not _runs_on(capability, built)}
    )
    if foreign:
        message_of_architecture = (
            f"this torch is built for {', '.join(sorted(built))}, and a GPU here is sm_{foreign[0]}"
        )
        yield make_failure("torch", message_of_architecture, "lock a torch that is built for it", foreign=foreign)


def judge_future_torch(gpus: Mapping[str, Any] | None, build: Mapping[str, Any], ray: str) -> Finding:
    """Judge whether the driver of a host without torch supports the torch of environments to be built there.

    Args:
        gpus: what nvidia-smi says there; None: there is none.
        build: `look_at_torch` of the program, whose lock environments are built from.
        ray: the version of Ray that a Python with torch should have.
    """
    message, advice = (
        f"no Python here has torch and Ray {ray}",
        "`nrl venvs build base` there, or let the next run build it",
    )
    if gpus is None or not gpus["devices"] or not build.get("cuda"):
        return make_note("torch", message, advice)
    if is_driver_too_old(gpus, build["cuda"]):
        start = f"{message}; the program's is built for CUDA {build['cuda']}, and driver {gpus['driver']} runs CUDA "
        return make_failure(
            "torch", f"{start}{gpus['cuda']} at most", _advise_driver(gpus, build["cuda"]), cuda=build["cuda"]
        )
    return make_note(
        "torch", f"{message}; driver {gpus['driver']} runs the program's, for CUDA {build['cuda']}", advice
    )


def is_driver_too_old(gpus: Mapping[str, Any], cuda: str | None) -> bool:
    """Return whether a driver is too old for a build for some CUDA: it runs all builds of its own major version.

    >>> (
    ...     [is_driver_too_old({"cuda": "12.4"}, built) for built in ("12.8", "13.0", None)],
    ...     is_driver_too_old({"cuda": None}, "13.0"),
    ... )
    ([False, True, False], False)
    """
    return bool(cuda and gpus["cuda"]) and Version(gpus["cuda"]).major < Version(str(cuda)).major


def _advise_driver(gpus: Mapping[str, Any], cuda: str) -> str:
    return (
        f"install a driver for CUDA {cuda}, or one of NVIDIA's cuda-compat packages, or lock a torch that "
        f"is built for CUDA {gpus['cuda']}"
    )


def environments(facts: Facts) -> Iterator[Finding]:
    """Check that executables have complete environments with the lock's packages."""
    yield from judge_environments(look_at_environments(EXECUTABLES), make_recipe)


def judge_environments(env_facts: Mapping[str, Any], recipe_of: Callable[[str], Recipe]) -> Iterator[Finding]:
    """Judge whether a host's environments are complete, with the packages of this process's lock.

    Args:
        env_facts: `look_at_environments` of the host.
        recipe_of: what the environment of an executable should be.
    """
    folder, complete = env_facts["folder"], {entry["name"]: entry for entry in env_facts["whole"]}
    for name in sorted({entry["executable"] for entry in complete.values()}):
        build = f"`nrl venvs build {name}`"
        try:
            expected = recipe_of(name)
        except NrlError as error:
            yield make_warning("environments", f"{name}: {error}", f"mend that, then {build}", executable=name)
            continue
        if (present := complete.get(expected.name)) is None:
            of_executable = [entry for entry in complete.values() if entry["executable"] == name]
            nearest = max(of_executable, key=lambda each: measure_similarity(each, expected.inventory))
            yield make_warning(
                "environments",
                f"{expected.name} is not in {folder}, which has {nearest['name']}, built {nearest['built']}; to what "
                f"the lock of {find_project().root} says it differs by "
                f"{describe_difference(nearest, expected.inventory)}",
                f"{build}, or let the next run build it; or go back to the lock that the other one was made from",
                executable=name,
            )
        elif wrong := present["wrong"]:
            advice = f"`NRL_FORCE_REBUILD_VENVS=1 nrl venvs build {name}` builds it again"
            yield make_warning(
                "environments", f"{expected.name}: {_list_few(wrong)}", advice, executable=name, wrong=wrong
            )
        elif not env_facts["writable"] and (lacking := sorted(set(expected.sources) - set(env_facts["sources"]))):
            message = f"{expected.name} is complete, but {folder} has no {lacking[0]} beside it, and cannot be written"
            advice_on_source = (
                "a program that starts would put the source there: set NRL_VENV_DIR to a folder that can be written"
            )
            yield make_warning(
                "environments", message, f"{advice_on_source}, or go back to the source in it", executable=name
            )
        else:
            yield make_ok("environments", f"{expected.name} is complete, and is what the lock says", executable=name)
    if not complete:
        yield make_note(
            "environments",
            f"none in {folder}: the first mesh of an executable builds one, which takes minutes without a cache",
            "`nrl venvs build base` builds one before",
        )
    if incomplete := env_facts["begun"]:
        advice_on_builds = "`nrl venvs prune` removes them, unless a builder is at work"
        yield make_note(
            "environments", f"{len(incomplete)} incomplete in {folder}, such as {incomplete[0]}", advice_on_builds
        )


def _check_requirements(installed: Mapping[str, str]) -> Iterator[Finding]:
    """Check nrl's own requirements, independently of the lock."""
    wrong = list[str]()
    for text in _read_metadata("Requires-Dist"):
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = installed.get(canonicalize_name(requirement.name))
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement} ({'missing' if version is None else version})")
    if wrong:
        yield make_failure("lock", f"nrl needs {_list_few(wrong)}", _SYNC, needed=wrong)


def _read_metadata(key: str) -> list[str]:
    """Return values of the metadata of nrl's package; empty if nrl is not installed, but on the path."""
    try:
        return [str(value) for value in metadata.metadata(DISTRIBUTION).get_all(key, [])]
    except metadata.PackageNotFoundError:
        return []


def _list_few(names: list[str]) -> str:
    return ", ".join(
        [*names[:_MAX_NAMED], *([f"and {len(names) - _MAX_NAMED} more"] if len(names) > _MAX_NAMED else [])]
    )


def _list_installed() -> Mapping[str, str]:
    versions = [(distribution.metadata["Name"], distribution.version) for distribution in metadata.distributions()]
    return {canonicalize_name(name): version for name, version in reversed(versions) if name}


def _runs_on(capability: str, built: set[str]) -> bool:
    """Return whether code for one of these architectures runs on a device: native code, or compiled there (PTX).

    >>> _runs_on("86", {"sm_80"}), _runs_on("121", {"sm_80", "compute_90"}), _runs_on("70", {"sm_80", "compute_80"})
    (True, True, False)
    """
    wanted_capability = int(capability)
    for architecture in built:
        kind, _, text = architecture.partition("_")
        number = int(text.rstrip("af"))
        if number <= wanted_capability and (kind == "compute" or number // 10 == wanted_capability // 10):
            return True
    return False


INSTALLATION: tuple[Check, ...] = (python, lock, environments)
"""The checks of what is installed, but for `torch`, which takes the longest; in the order in which they are shown."""
