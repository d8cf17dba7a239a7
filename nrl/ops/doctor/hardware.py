"""Checks of a machine's hardware, this one's or another's: they read facts alone."""

from collections.abc import Iterator, Sequence
from ipaddress import ip_address

from nrl.ops.doctor.findings import Check, Finding, format_gib, make_failure, make_note, make_ok, make_warning
from nrl.runtime.device_specs import peak
from nrl.runtime.node.machine import Facts

__all__ = [
    "HARDWARE",
    "cores",
    "disk",
    "gpu",
    "host_name",
    "is_loopback_name",
    "links",
    "memory",
    "mounts",
    "open_files",
    "shared_memory",
]

_FULL = 0.95  # The share of a disk beyond which Ray writes no objects there.
_RAYS_SHARE, _RAYS_LEAST = 0.3, 10**10  # The object store takes the smaller of this share of memory and these bytes.
_OPEN_FILES = 4096  # below it Ray itself warns
_SMALL = 4 << 30  # bytes of memory: a process of a mesh has about one
_MINIMUM = {"environments": 10 << 30, "uv_cache": 10 << 30, "hub": 10 << 30, "temporary": 10 << 30}
_OPTIONS = {"environments": "NRL_VENV_DIR", "uv_cache": "UV_CACHE_DIR", "hub": "HF_HOME", "temporary": "RAY_TMPDIR"}
_LONGEST = 48  # characters of Ray's folder: below it Ray makes sockets, whose paths have at most 107
_LINKS = {"SYS": "over the processors' own link", "NODE": "over a PCIe host bridge", "PHB": "over a PCIe host bridge"}
_BUSY = 1 << 30  # bytes of a GPU's memory in use


def cores(facts: Facts) -> Iterator[Finding]:
    """Check the number of processors that a process may use, by its mask and its cgroup."""
    counts = facts["cores"]
    allowed, quota = counts["allowed"], counts["quota"]
    usable = allowed if quota is None else min(allowed, quota)
    message = f"{usable:g}" + (f" of the machine's {counts['machine']}" if usable != counts["machine"] else "")
    if quota is not None and quota < allowed:
        yield make_warning(
            "cores",
            f"{message}: the cgroup allows {quota:g}, and other programs see {allowed} and start too many threads",
            f"set OMP_NUM_THREADS={counts['usable']}, or allow more (a pod's resources.limits.cpu, docker's --cpus)",
            **counts,
        )
    else:
        yield make_ok("cores", message, **counts)


def memory(facts: Facts) -> Iterator[Finding]:
    """Check the memory of the machine and the limit of the cgroup."""
    sizes = facts["memory"]
    if sizes["total"] is None:
        yield make_note("memory", "not known: there is no /proc/meminfo", **sizes)
        return
    total = min(sizes["total"], sizes["limit"] or sizes["total"])
    free = total if sizes["available"] is None else min(sizes["available"], total)
    limited = (
        f", the limit of the cgroup, of the machine's {format_gib(sizes['total'])}" if total < sizes["total"] else ""
    )
    message = f"{format_gib(total)}{limited}; {format_gib(free)} available"
    if free < _SMALL:
        advice = (
            "end what else runs here, or allow more: Ray kills processes when 95 % are in use, and each has about 1 GiB"
        )
        yield make_warning("memory", message, advice, **sizes)
    else:
        yield make_ok("memory", message, **sizes)


def shared_memory(facts: Facts) -> Iterator[Finding]:
    """Check that Ray's object store has room in /dev/shm."""
    folder, total = facts["folders"]["shared_memory"], facts["memory"]["limit"] or facts["memory"]["total"] or 0
    if "error" in folder or not folder["exists"]:
        yield make_failure(
            "shared_memory",
            f"there is no {folder['path']}",
            "mount a tmpfs there: processes of a mesh share batches and weights in it",
        )
    elif not folder["writable"]:
        yield make_failure(
            "shared_memory", f"{folder['path']} cannot be written", f"chmod 1777 {folder['path']}", **folder
        )
    elif folder["total"] < (object_store := min(_RAYS_SHARE * total, _RAYS_LEAST)):
        yield make_warning(
            "shared_memory",
            f"{folder['path']} has {format_gib(folder['total'])}, and Ray's object store takes "
            f"{format_gib(object_store)}: it would lie on the disk of Ray's temporary folder, which is slow",
            "make it larger (docker run --shm-size, a pod's emptyDir with medium: Memory), or give "
            "`ray start --object-store-memory` less",
            **folder,
        )
    else:
        yield make_ok(
            "shared_memory",
            f"{folder['path']} has {format_gib(folder['total'])}, {format_gib(folder['free'])} free",
            **folder,
        )


def disk(facts: Facts) -> Iterator[Finding]:
    """Check that the folders of nrl, uv, Ray and the hub can be written, and have room."""
    for name, least in _MINIMUM.items():
        folder, option = facts["folders"][name], _OPTIONS[name]
        label = f"{name.replace('_', ' ')}: {folder['path']}"
        if "error" in folder:
            yield make_failure(
                "disk", f"{label} cannot be read ({folder['error']})", f"mend it, or set {option}", **folder
            )
        elif not folder["writable"]:
            missing = "" if folder["exists"] else " does not exist, and"
            yield make_failure(
                "disk", f"{label}{missing} cannot be written", f"set {option} to a folder that can be", **folder
            )
        elif folder["free"] < least / 10:
            yield make_failure(
                "disk", f"{label} has {format_gib(folder['free'])} free", f"make room, or set {option}", **folder
            )
        elif folder["free"] < least:
            advice = f"make room, or set {option} to a larger disk: an environment has 5 GB, and so have many models"
            yield make_warning("disk", f"{label} has {format_gib(folder['free'])} free", advice, **folder)
        elif name == "temporary" and folder["free"] < (1 - _FULL) * folder["total"]:
            share = 1 - folder["free"] / folder["total"]
            yield make_warning(
                "disk",
                f"{label} is {share:.0%} full: beyond {_FULL:.0%} Ray spills no objects there",
                "make room, or set RAY_TMPDIR, or RAY_local_fs_capacity_threshold=0.99 where the disk is large",
                **folder,
            )
        elif name == "temporary" and len(folder["path"]) > _LONGEST:
            yield make_warning(
                "disk",
                f"{label} has {len(folder['path'])} characters: paths of Ray's sockets in it would be too long",
                "set RAY_TMPDIR to a short one, such as /tmp/me",
                **folder,
            )
        else:
            yield make_ok("disk", f"{label} has {format_gib(folder['free'])} free", **folder)


def mounts(facts: Facts) -> Iterator[Finding]:
    """Check that uv can link packages from its cache into environments."""
    envs, cache = facts["folders"]["environments"], facts["folders"]["uv_cache"]
    if "error" in envs or "error" in cache:  # The check of disks reports the error.
        return
    copies = facts["link_mode"] == "copy"
    if copies or envs["device"] != cache["device"]:
        reason = "UV_LINK_MODE is copy" if copies else f"{envs['path']} and {cache['path']} are on two mounts"
        yield make_warning(
            "mounts",
            f"{reason}, so uv copies all packages into each environment: 5 GB each instead of 20 MB",
            "leave UV_LINK_MODE out" if copies else "set NRL_VENV_DIR and UV_CACHE_DIR to folders of one mount",
        )
    else:
        yield make_ok("mounts", "environments and uv's cache are on one, so packages are linked and not copied")


def host_name(facts: Facts) -> Iterator[Finding]:
    """Check the addresses of the host's own name: gloo takes the first unless an interface is chosen."""
    host, addresses = facts["host"], facts["addresses"]
    listing = ", ".join(addresses)
    if not addresses:
        yield make_warning(
            "host_name",
            f"{host} stands for no address",
            f"add a line with this host's address and {host} to /etc/hosts",
            addresses=addresses,
        )
    elif is_loopback_name(addresses):
        yield make_note(
            "host_name",
            f"{host} stands for {listing}, where other hosts do not find it; nothing else matters on one host",
            f"with several hosts: give {host} this host's own address in /etc/hosts",
            addresses=addresses,
        )
    else:
        yield make_ok("host_name", f"{host} is {listing}", addresses=addresses)


def is_loopback_name(addresses: Sequence[str]) -> bool:
    """Return whether a program that listens at the host's own name is reachable from this host alone.

    >>> is_loopback_name(["127.0.1.1", "10.0.0.3"]), is_loopback_name(["10.0.0.3", "127.0.1.1"]), is_loopback_name([])
    (True, False, False)
    """
    return bool(addresses) and ip_address(addresses[0].partition("%")[0]).is_loopback


def open_files(facts: Facts) -> Iterator[Finding]:
    """Check the limit of open files; each process of Ray has connections to many."""
    soft, hard = facts["open_files"]
    message = f"{_format_count(soft)} a process" + ("" if hard == soft else f", at most {_format_count(hard)}")
    if 0 <= soft < _OPEN_FILES:
        advice = (
            "`ulimit -n 65536` before `ray start`, or LimitNOFILE= of its service, or docker's --ulimit nofile=65536"
        )
        yield make_warning("open_files", message, advice, soft=soft, hard=hard)
    else:
        yield make_ok("open_files", message, soft=soft, hard=hard)


def gpu(facts: Facts) -> Iterator[Finding]:
    """Check the GPUs, their memory, and its current use."""
    gpus = facts["gpus"]
    if gpus is None:
        yield make_note("gpu", "there is none (no nvidia-smi): all runs on CPUs", devices=[])
        return
    if gpus["unseen"]:
        yield make_warning(
            "gpu",
            f"there is {', '.join(gpus['unseen'])}, and no nvidia-smi on PATH: driver, memory and links are not known",
            "put it there; in a container NVIDIA_DRIVER_CAPABILITIES=compute,utility",
            **gpus,
        )
        return
    if gpus["error"] or not gpus["devices"]:
        yield make_failure(
            "gpu",
            f"nvidia-smi finds no GPU: {gpus['error'] or 'it lists none'}",
            "mend the driver (`nvidia-smi` has to list them), give them to the container (docker's --gpus all, a pod's "
            "nvidia.com/gpu), or take nvidia-smi off PATH where there is none",
            **gpus,
        )
        return
    devices = gpus["devices"]
    kinds = {(device["name"], device["memory"]): 0 for device in devices}
    for device in devices:
        kinds[device["name"], device["memory"]] += 1
    listed = ", ".join(f"{count} x {name}, {format_gib(size or 0)}" for (name, size), count in kinds.items())
    values = {"driver": gpus["driver"], "cuda": gpus["cuda"], "devices": devices}
    if len(kinds) > 1:
        advice = (
            "reserve slots on equal ones (CUDA_VISIBLE_DEVICES before `ray start`): the slowest sets the pace of a mesh"
        )
        yield make_warning("gpu", f"{listed}: they differ", advice, **values)
    else:
        yield make_ok("gpu", f"{listed}; driver {gpus['driver']}", **values)
    for index, device in enumerate(devices):
        if (device["used"] or 0) > _BUSY:
            end = "find out whose process it is (`nvidia-smi`) and end it, or leave this GPU out (CUDA_VISIBLE_DEVICES)"
            yield make_warning(
                "gpu", f"GPU {index}: {format_gib(device['used'])} of its memory are in use already", end
            )
        if device["mode"] not in ("", "Default", "N/A"):
            share = "nvidia-smi -c DEFAULT: a trainer and a sampler on one GPU are two processes"
            yield make_warning("gpu", f"GPU {index}: its compute mode is {device['mode']}", share)
        if device["mig"] == "Enabled":
            yield make_note("gpu", f"GPU {index} is cut in parts (MIG)", "name the part in CUDA_VISIBLE_DEVICES")
    for name in sorted({device["name"] for device in devices}):
        if peak(name) is None:
            yield make_note("gpu", f"nrl does not know how fast a {name} is, so logs have no mfu")


def links(facts: Facts) -> Iterator[Finding]:
    """Check the links between the GPUs of a host."""
    gpus = facts["gpus"]
    if gpus is None or len(gpus["devices"]) < 2:
        return
    kinds = sorted({link for row in gpus["links"] for link in row if link != "X"})
    if not kinds:
        yield make_note("links", "not known: `nvidia-smi topo -m` says nothing")
    elif slow := [link for link in kinds if link in _LINKS]:
        yield make_note(
            "links",
            f"{', '.join(kinds)}: some GPUs reach each other {_LINKS[slow[-1]]}, which is slow for shards of a layer",
            "keep `tp` within GPUs that are linked by NVLink",
            links=gpus["links"],
        )
    else:
        yield make_ok("links", ", ".join(kinds), links=gpus["links"])


def _format_count(number: int) -> str:
    return "unlimited" if number < 0 else str(number)


HARDWARE: tuple[Check, ...] = (
    cores, memory, shared_memory, disk, mounts, host_name, open_files, gpu, links,
)  # fmt: skip
"""The checks that need facts alone, in the order of display."""
