"""``nrl deploy kubernetes``: manifests that run a program by KubeRay, the operator of Ray for Kubernetes."""

import re
import shlex
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

import attrs

from nrl import config
from nrl.arguments import checked
from nrl.errors import ConfigError
from nrl.ops.deploy.checks import (
    check_owned,
    check_plain,
    check_secrets,
    check_variables,
    match_pattern,
    program_arguments,
    with_grace,
)
from nrl.ops.deploy.programs import check_fits, load_config, settings_in_files
from nrl.ops.deploy.writing import fill_template, write

__all__ = ["Kubernetes", "main", "make_manifests"]

_COMMAND = "deploy kubernetes"
_REFERENCE = re.compile(r"([a-z0-9]([a-z0-9.-]*[a-z0-9])?)/([\w.-]+)", re.ASCII)
_EFFECTS = "NoSchedule|PreferNoSchedule|NoExecute"
_SPARE = 30
"""Seconds of the grace period in which Ray ends, after the program."""
_VARIABLES = {
    "RAY_JOB_STOP_WAIT_TIME_S": "grace=",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "",
    "PYTHONUNBUFFERED": "",
    "RAY_process_group_cleanup_enabled": "",
    "RAY_enable_pipe_based_agent_to_parent_health_check": "",
    **dict.fromkeys(("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_CLUSTER_NAME", "RAY_PORT"), ""),
    **dict.fromkeys(("RAY_IP", "FQ_RAY_IP", "KUBERAY_GEN_RAY_START_CMD", "NRL_CLUSTER"), ""),
}
"""Variables that the manifest, its scripts or the operator set, and what to give instead."""
_positive = attrs.validators.ge(1)
_maybe = attrs.validators.optional(_positive)
_not_negative = attrs.validators.ge(0)
_job = match_pattern(
    r"[a-z]([a-z0-9-]{0,45}[a-z0-9])?", "a name of at most 47 small letters, digits and -, a letter first"
)
_name = match_pattern(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", "a name of small letters, digits, - and .")
_label = match_pattern(
    r"([a-z0-9.-]+/)?[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?", "a label, such as topology.kubernetes.io/zone"
)
_quantity = match_pattern(r"[1-9]\d*(\.\d+)?([KMGT]i?)?", "a quantity such as 64Gi")
_cores = match_pattern(r"[1-9]\d*m?|\d+\.\d+", "a number of cores such as 8 or 500m")
_image = match_pattern(r"[a-z0-9][\w./:@-]*", "the name of an image, such as registry.example/team/nrl:1")
_absolute = match_pattern(r"/[^:]*", "an absolute path")
_toleration = match_pattern(
    rf"[\w./-]+(=[\w.-]*)?(:({_EFFECTS}))?", "tolerations such as dedicated=training:NoSchedule"
)


def _labels(instance: Any, attribute: Any, value: dict[str, str]) -> None:
    _label(instance, attribute, value)
    match_pattern(r"([A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?)?", "values of labels")(instance, attribute, value.values())


def _references(instance: Any, attribute: Any, value: dict[str, str]) -> None:
    check_variables(instance, attribute, value)
    for reference in value.values():
        if _REFERENCE.fullmatch(reference) is None:
            raise ValueError(f"expected SECRET/KEY, the name of a Secret and of a key in it, found {reference!r}")


@checked("kubernetes")
@attrs.frozen(kw_only=True)
class Kubernetes:
    """Write manifests that run a program by KubeRay. The program's own settings follow `--`."""

    program: str  # the Python file, in the image, from folder
    image: str = attrs.field(
        validator=_image
    )  # an image that has nrl, the program and the environments of its executables
    arguments: tuple[str, ...] = ()  # the program's arguments; on the command line they follow `--`
    name: str = config.derived(
        lambda cfg: re.sub("[^a-z0-9]+", "-", Path(cfg.program).stem.lower()).strip("-"),
        help="of the job and the cluster; all other names begin with it",
        validator=_job,
    )
    namespace: str | None = attrs.field(default=None, validator=_name)  # none: that of kubectl
    to: str = config.derived(lambda cfg: f"{cfg.name}-kubernetes")  # the folder to write
    force: bool = False  # replace files that differ
    workers: int = attrs.field(default=1, validator=_positive)  # pods
    gpus: int = attrs.field(default=0, validator=_not_negative)  # GPUs of a worker
    gpu_resource: str = attrs.field(default="nvidia.com/gpu", validator=_label)  # how nodes offer GPUs
    cpus: str = attrs.field(default="8", validator=_cores)  # cores of a worker
    memory: str = attrs.field(default="64Gi", validator=_quantity)  # memory of a worker
    shared_memory: str = attrs.field(default="16Gi", validator=_quantity)  # memory of a pod, for Ray's object store
    head_cpus: str = attrs.field(default="4", validator=_cores)  # the program runs on the head
    head_memory: str = attrs.field(default="32Gi", validator=_quantity)  # memory of the head
    more: dict[str, str] = attrs.field(factory=dict)  # further resources of a worker, such as rdma/hca=1
    claim: str = config.derived(lambda cfg: f"{cfg.name}-shared", validator=_name)  # the volume that all pods mount
    storage: str | None = attrs.field(
        default=None, validator=_quantity
    )  # size of a new volume; none: the claim is there
    storage_class: str | None = attrs.field(default=None, validator=_name)  # class of a new volume, with ReadWriteMany
    mount: str = attrs.field(default="/shared", validator=_absolute)  # folder of the volume in pods
    out: str = config.derived(lambda cfg: f"{cfg.mount}/runs/{cfg.name}", validator=_absolute)  # the run's folder
    folder: str = attrs.field(default="/src", validator=_absolute)  # folder in the image where the program runs
    env: dict[str, str] = attrs.field(factory=dict, validator=check_variables)  # variables of all pods; no secrets
    secrets: dict[str, str] = attrs.field(factory=dict, validator=_references)  # {HF_TOKEN: SECRET/KEY}, references
    image_pull_secrets: tuple[str, ...] = attrs.field(default=(), validator=_name)  # names of Secrets
    service_account: str | None = attrs.field(
        default=None, validator=_name
    )  # account of the pods; none: the namespace's
    priority: str | None = attrs.field(default=None, validator=_name)  # a PriorityClass
    user: int | None = attrs.field(default=None, validator=_maybe)  # user id of the processes; none: the image's
    node_selector: dict[str, str] = attrs.field(factory=dict, validator=_labels)  # labels of nodes for workers
    head_node_selector: dict[str, str] = attrs.field(factory=dict, validator=_labels)  # labels of a node for the head
    tolerations: tuple[str, ...] = attrs.field(default=(), validator=_toleration)  # KEY[=VALUE][:EFFECT] of workers
    topology: str | None = attrs.field(default=None, validator=_label)  # a label of nodes; workers share one value
    labels: dict[str, str] = attrs.field(factory=dict, validator=_labels)  # kueue.x-k8s.io/queue-name and others
    check: bool = True  # load the settings into the Config of a program that is here, too
    suspend: bool = False  # begin suspended
    grace: int = attrs.field(default=120, validator=_positive)  # seconds for the program to save, when pods end
    retries: int = attrs.field(default=3, validator=_not_negative)  # after a failure, each on a new cluster
    deadline: int | None = attrs.field(default=None, validator=_maybe)  # seconds for each start; none: any time
    keep: int = attrs.field(default=3600, validator=_not_negative)  # seconds for which pods stay at the end
    ray_version: str = config.derived(
        lambda cfg: metadata.version("ray"), validator=match_pattern(r"\d+(\.\d+)+", "numbers")
    )  # Ray's version in the image


def main(cfg: Kubernetes) -> None:
    """Write the manifests, and say how they are applied.

    Raises:
        ConfigError: settings that contradict each other, or a file that differs is there.
    """
    files = {Path(cfg.to) / name: text for name, text in make_manifests(cfg).items()}
    write(files, force=cfg.force, command=_COMMAND)
    print(
        f"{len(files)} files are in {cfg.to}; run the program by\n  kubectl apply {_apply_options(cfg, 'rayjob.yaml')}"
    )
    if cfg.storage is None:
        print(
            f"Its pods mount the PersistentVolumeClaim {cfg.claim}, which has to be there, and stay Pending without "
            "it; claim= names another one, and storage= makes one"
        )


def make_manifests(cfg: Kubernetes) -> dict[str, str]:
    """The texts of the files, by their names.

    Raises:
        ConfigError: settings that contradict each other.
    """
    check_plain(cfg, _COMMAND)
    check_owned((*cfg.env, *cfg.secrets), _VARIABLES, _COMMAND)
    if twice := sorted(cfg.env.keys() & cfg.secrets.keys()):
        raise ConfigError(f"{_COMMAND}: found {twice[0]} in env= and in secrets=; leave it in one of them")
    check_secrets(cfg.arguments, cfg.env, _COMMAND, "give secrets.VARIABLE=SECRET/KEY, a reference to one")
    own_arguments = program_arguments(cfg.arguments, _COMMAND)
    arguments = with_grace(own_arguments, settings_in_files(own_arguments, "."), cfg.grace, 0, _COMMAND)
    _check(cfg)
    if cfg.check:  # In the image the program is in another folder, with the same path from there.
        added = (*arguments[len(own_arguments) :], "cluster=auto", f"out={cfg.out}")
        loaded = load_config(cfg.program, own_arguments, added, ".", _COMMAND)
        check_fits(loaded, "workers", cfg.workers, cfg.gpus, _COMMAND)
    values: dict[str, Any] = attrs.asdict(cfg) | {
        "grace": cfg.grace + _SPARE,
        "command": shlex.join([cfg.program, *arguments, "cluster=auto", f"out={cfg.out}"]),
        "running": f"{cfg.out.rstrip('/')}.running",
        "leaving": f"{cfg.out.rstrip('/')}.leaving",
        "parent": str(PurePosixPath(cfg.out).parent),
        "references": [(name, *item.split("/")) for name, item in cfg.secrets.items()],
        "head_resources": {"cpu": cfg.head_cpus, "memory": cfg.head_memory},
        "worker_resources": {
            "cpu": cfg.cpus,
            "memory": cfg.memory,
            **({cfg.gpu_resource: cfg.gpus} if cfg.gpus else {}),
            **cfg.more,
        },
        "tolerated": _list_tolerations(cfg),
    }
    values["spec"] = fill_template("cluster_spec.yaml.jinja", values)
    values["scripts"] = {item: fill_template(f"{item}.jinja", values) for item in ("start.sh", "stop.sh", "wait.sh")}
    kinds = ["scripts.yaml", *(["volume.yaml"] if cfg.storage else []), "rayjob.yaml", "raycluster.yaml"]
    return {item: fill_template(f"{item}.jinja", values | {"applied": _apply_options(cfg, item)}) for item in kinds}


def _check(cfg: Kubernetes) -> None:
    if not PurePosixPath(cfg.out).is_relative_to(cfg.mount) or PurePosixPath(cfg.out) == PurePosixPath(cfg.mount):
        raise ConfigError(
            f"{_COMMAND}: out={cfg.out} is not in mount={cfg.mount}, the volume of all pods; give a folder there"
        )
    if cfg.storage_class and not cfg.storage:
        raise ConfigError(
            f"{_COMMAND}: found storage_class={cfg.storage_class} without storage=, the size of a new volume"
        )


def _list_tolerations(cfg: Kubernetes) -> list[dict[str, str]]:
    """Return the tolerations of workers; nodes with GPUs are commonly kept free from other pods."""
    tolerations = [{"key": cfg.gpu_resource, "operator": "Exists", "effect": "NoSchedule"}] if cfg.gpus else []
    for text in cfg.tolerations:
        rest, _, effect = text.partition(":")
        key, equals, value = rest.partition("=")
        match = {"operator": "Equal", "value": value} if equals else {"operator": "Exists"}
        tolerations.append({"key": key, **match, **({"effect": effect} if effect else {})})
    return tolerations


def _apply_options(cfg: Kubernetes, kind: str) -> str:
    files = ["scripts.yaml", *(["volume.yaml"] if cfg.storage else []), kind]
    return " ".join(f"-f {shlex.quote(f'{cfg.to}/{file}')}" for file in files)
