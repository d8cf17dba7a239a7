"""Checks that judge what a machine is, this one or another: they read facts and nothing else."""

from collections.abc import Iterator, Sequence
from ipaddress import ip_address

from nrl.ops.doctor.findings import Check, Finding, failed, gib, note, ok, warning
from nrl.runtime.device_specs import peak
from nrl.runtime.node.machine import Facts

__all__ = [
    "HARDWARE",
    "cores",
    "disk",
    "gpu",
    "host_name",
    "leads_home",
    "links",
    "memory",
    "mounts",
    "open_files",
    "shared_memory",
]

_FULL = 0.95  # of a disk: beyond it Ray writes nothing there any more
_RAYS_SHARE, _RAYS_LEAST = 0.3, 10**10  # of the memory, and bytes, that Ray's object store takes at least, if it can
_OPEN_FILES = 4096  # below it Ray itself warns
_SMALL = 4 << 30  # bytes of memory: a process of a mesh has about one
_LEAST = {"environments": 10 << 30, "uv_cache": 10 << 30, "hub": 10 << 30, "temporary": 10 << 30}
_WAYS = {"environments": "NRL_VENV_DIR", "uv_cache": "UV_CACHE_DIR", "hub": "HF_HOME", "temporary": "RAY_TMPDIR"}
_LONGEST = 48  # characters of Ray's folder: below it Ray makes sockets, whose paths have at most 107
_LINKS = {"SYS": "over the processors' own link", "NODE": "over a PCIe host bridge", "PHB": "over a PCIe host bridge"}
_BUSY = 1 << 30  # bytes of a GPU's memory in use


def cores(facts: Facts) -> Iterator[Finding]:
    """How many processors a process may use, by its mask and its cgroup."""
    found = facts["cores"]
    allowed, quota = found["allowed"], found["quota"]
    usable = allowed if quota is None else min(allowed, quota)
    said = f"{usable:g}" + (f" of the machine's {found['machine']}" if usable != found["machine"] else "")
    if quota is not None and quota < allowed:
        yield warning(
            "cores",
            f"{said}: the cgroup allows {quota:g}, and other programs see {allowed} and start too many threads",
            f"set OMP_NUM_THREADS={found['usable']}, or allow more (a pod's resources.limits.cpu, docker's --cpus)",
            **found,
        )
    else:
        yield ok("cores", said, **found)


def memory(facts: Facts) -> Iterator[Finding]:
    """How much memory there is, by the machine and the cgroup."""
    found = facts["memory"]
    if found["total"] is None:
        yield note("memory", "not known: there is no /proc/meminfo", **found)
        return
    whole = min(found["total"], found["limit"] or found["total"])
    free = whole if found["available"] is None else min(found["available"], whole)
    limited = f", the limit of the cgroup, of the machine's {gib(found['total'])}" if whole < found["total"] else ""
    said = f"{gib(whole)}{limited}; {gib(free)} available"
    if free < _SMALL:
        more = (
            "end what else runs here, or allow more: Ray kills processes when 95 % are in use, and each has about 1 GiB"
        )
        yield warning("memory", said, more, **found)
    else:
        yield ok("memory", said, **found)


def shared_memory(facts: Facts) -> Iterator[Finding]:
    """Whether Ray's object store has room in /dev/shm."""
    found, whole = facts["folders"]["shared_memory"], facts["memory"]["limit"] or facts["memory"]["total"] or 0
    if "error" in found or not found["exists"]:
        yield failed(
            "shared_memory",
            f"there is no {found['path']}",
            "mount a tmpfs there: processes of a mesh share batches and weights in it",
        )
    elif not found["writable"]:
        yield failed("shared_memory", f"{found['path']} cannot be written", f"chmod 1777 {found['path']}", **found)
    elif found["total"] < (asked := min(_RAYS_SHARE * whole, _RAYS_LEAST)):
        yield warning(
            "shared_memory",
            f"{found['path']} has {gib(found['total'])}, and Ray's object store takes {gib(asked)}: it would lie on "
            "the disk of Ray's temporary folder, which is slow",
            "make it larger (docker run --shm-size, a pod's emptyDir with medium: Memory), or give "
            "`ray start --object-store-memory` less",
            **found,
        )
    else:
        yield ok("shared_memory", f"{found['path']} has {gib(found['total'])}, {gib(found['free'])} free", **found)


def disk(facts: Facts) -> Iterator[Finding]:
    """Whether the folders that nrl, uv, Ray and the hub fill can be written, and have room."""
    for name, least in _LEAST.items():
        found, way = facts["folders"][name], _WAYS[name]
        where = f"{name.replace('_', ' ')}: {found['path']}"
        if "error" in found:
            yield failed("disk", f"{where} cannot be read ({found['error']})", f"mend it, or set {way}", **found)
        elif not found["writable"]:
            made = "" if found["exists"] else " does not exist, and"
            yield failed("disk", f"{where}{made} cannot be written", f"set {way} to a folder that can be", **found)
        elif found["free"] < least / 10:
            yield failed("disk", f"{where} has {gib(found['free'])} free", f"make room, or set {way}", **found)
        elif found["free"] < least:
            more = f"make room, or set {way} to a larger disk: an environment has 5 GB, and so have many models"
            yield warning("disk", f"{where} has {gib(found['free'])} free", more, **found)
        elif name == "temporary" and found["free"] < (1 - _FULL) * found["total"]:
            share = 1 - found["free"] / found["total"]
            yield warning(
                "disk",
                f"{where} is {share:.0%} full: beyond {_FULL:.0%} Ray spills no objects there",
                "make room, or set RAY_TMPDIR, or RAY_local_fs_capacity_threshold=0.99 where the disk is large",
                **found,
            )
        elif name == "temporary" and len(found["path"]) > _LONGEST:
            yield warning(
                "disk",
                f"{where} has {len(found['path'])} characters: paths of Ray's sockets in it would be too long",
                "set RAY_TMPDIR to a short one, such as /tmp/me",
                **found,
            )
        else:
            yield ok("disk", f"{where} has {gib(found['free'])} free", **found)


def mounts(facts: Facts) -> Iterator[Finding]:
    """Whether uv can link packages from its cache into environments."""
    envs, cache = facts["folders"]["environments"], facts["folders"]["uv_cache"]
    if "error" in envs or "error" in cache:  # which the check of disks says
        return
    copies = facts["link_mode"] == "copy"
    if copies or envs["device"] != cache["device"]:
        why = "UV_LINK_MODE is copy" if copies else f"{envs['path']} and {cache['path']} are on two mounts"
        yield warning(
            "mounts",
            f"{why}, so uv copies all packages into each environment: 5 GB each instead of 20 MB",
            "leave UV_LINK_MODE out" if copies else "set NRL_VENV_DIR and UV_CACHE_DIR to folders of one mount",
        )
    else:
        yield ok("mounts", "environments and uv's cache are on one, so packages are linked and not copied")


def host_name(facts: Facts) -> Iterator[Finding]:
    """What the host's own name stands for: gloo takes that address where nobody chooses an interface."""
    host, found = facts["host"], facts["addresses"]
    many = ", ".join(found)
    if not found:
        yield warning(
            "host_name",
            f"{host} stands for no address",
            f"add a line with this host's address and {host} to /etc/hosts",
            addresses=found,
        )
    elif leads_home(found):
        yield note(
            "host_name",
            f"{host} stands for {many}, where other hosts do not find it; nothing else matters on one host",
            f"with several hosts: give {host} this host's own address in /etc/hosts",
            addresses=found,
        )
    else:
        yield ok("host_name", f"{host} is {many}", addresses=found)


def leads_home(addresses: Sequence[str]) -> bool:
    """Whether a program that listens at the host's own name is heard on this host alone.

    >>> leads_home(["127.0.1.1", "10.0.0.3"]), leads_home(["10.0.0.3", "127.0.1.1"]), leads_home([])
    (True, False, False)
    """
    return bool(addresses) and ip_address(addresses[0].partition("%")[0]).is_loopback


def open_files(facts: Facts) -> Iterator[Finding]:
    """How many files a process may open; each process of Ray has connections to many."""
    soft, hard = facts["open_files"]
    said = f"{_count(soft)} a process" + ("" if hard == soft else f", at most {_count(hard)}")
    if 0 <= soft < _OPEN_FILES:
        enough = (
            "`ulimit -n 65536` before `ray start`, or LimitNOFILE= of its service, or docker's --ulimit nofile=65536"
        )
        yield warning("open_files", said, enough, soft=soft, hard=hard)
    else:
        yield ok("open_files", said, soft=soft, hard=hard)


def gpu(facts: Facts) -> Iterator[Finding]:
    """The GPUs, their memory, and what uses it already."""
    found = facts["gpus"]
    if found is None:
        yield note("gpu", "there is none (no nvidia-smi): all runs on CPUs", devices=[])
        return
    if found["unseen"]:
        yield warning(
            "gpu",
            f"there is {', '.join(found['unseen'])}, and no nvidia-smi on PATH: driver, memory and links are not known",
            "put it there; in a container NVIDIA_DRIVER_CAPABILITIES=compute,utility",
            **found,
        )
        return
    if found["error"] or not found["devices"]:
        yield failed(
            "gpu",
            f"nvidia-smi finds no GPU: {found['error'] or 'it lists none'}",
            "mend the driver (`nvidia-smi` has to list them), give them to the container (docker's --gpus all, a pod's "
            "nvidia.com/gpu), or take nvidia-smi off PATH where there is none",
            **found,
        )
        return
    devices = found["devices"]
    kinds = {(each["name"], each["memory"]): 0 for each in devices}
    for each in devices:
        kinds[each["name"], each["memory"]] += 1
    listed = ", ".join(f"{count} x {name}, {gib(size or 0)}" for (name, size), count in kinds.items())
    about = {"driver": found["driver"], "cuda": found["cuda"], "devices": devices}
    if len(kinds) > 1:
        same = (
            "reserve slots on equal ones (CUDA_VISIBLE_DEVICES before `ray start`): the slowest sets the pace of a mesh"
        )
        yield warning("gpu", f"{listed}: they differ", same, **about)
    else:
        yield ok("gpu", f"{listed}; driver {found['driver']}", **about)
    for place, each in enumerate(devices):
        if (each["used"] or 0) > _BUSY:
            end = "find out whose process it is (`nvidia-smi`) and end it, or leave this GPU out (CUDA_VISIBLE_DEVICES)"
            yield warning("gpu", f"GPU {place}: {gib(each['used'])} of its memory are in use already", end)
        if each["mode"] not in ("", "Default", "N/A"):
            share = "nvidia-smi -c DEFAULT: a trainer and a sampler on one GPU are two processes"
            yield warning("gpu", f"GPU {place}: its compute mode is {each['mode']}", share)
        if each["mig"] == "Enabled":
            yield note("gpu", f"GPU {place} is cut in parts (MIG)", "name the part in CUDA_VISIBLE_DEVICES")
    for name in sorted({each["name"] for each in devices}):
        if peak(name) is None:
            yield note("gpu", f"nrl does not know how fast a {name} is, so logs have no mfu")


def links(facts: Facts) -> Iterator[Finding]:
    """How the GPUs of a host are linked."""
    found = facts["gpus"]
    if found is None or len(found["devices"]) < 2:
        return
    kinds = sorted({way for row in found["links"] for way in row if way != "X"})
    if not kinds:
        yield note("links", "not known: `nvidia-smi topo -m` says nothing")
    elif slow := [way for way in kinds if way in _LINKS]:
        yield note(
            "links",
            f"{', '.join(kinds)}: some GPUs reach each other {_LINKS[slow[-1]]}, which is slow for shards of a layer",
            "keep `tp` within GPUs that are linked by NVLink",
            links=found["links"],
        )
    else:
        yield ok("links", ", ".join(kinds), links=found["links"])


def _count(number: int) -> str:
    return "unlimited" if number < 0 else str(number)


HARDWARE: tuple[Check, ...] = (
    cores, memory, shared_memory, disk, mounts, host_name, open_files, gpu, links,
)  # fmt: skip
"""The checks that need nothing but facts, in the order in which they are shown."""
