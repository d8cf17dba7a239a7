"""Entering Ray: joining a cluster that runs, or starting one on this machine."""

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from nrl.errors import PlacementError
from nrl.runtime.ray import logs

__all__ = ["available_resources", "connect", "disconnect", "list_nodes", "resolve_address"]

_CPUS = 64  # The CPUs that a cluster on this machine claims: its processes may share cores.
_ANSWER_PATIENCE = 20.0  # seconds for a host to answer
# The preface of HTTP/2, and empty settings.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_START_VARIABLES = {"RAY_prestart_worker_first_driver": "0"}  # nobody uses workers of the driver's interpreter


def resolve_address(address: str) -> str | None:
    """Return the address of a running cluster; None: a cluster has to be started.

    Args:
        address: of `nrl.cluster`.

    Raises:
        PlacementError: it is an address of Ray Client.

    >>> resolve_address("10.0.0.3:6379")
    '10.0.0.3:6379'
    """
    from_environment = os.environ.get("RAY_ADDRESS")  # Ray itself prefers it to "auto"
    resolved = from_environment or (None if address == "ray" else address) if address in ("ray", "auto") else address
    if resolved and resolved.startswith("ray://"):
        raise PlacementError(
            f"cluster: {resolved} is an address of Ray Client, through which every batch and result would take a "
            "detour over a proxy, and which cannot pass tensors in shared memory. Run the program on a node of the "
            "cluster (`ray job submit -- python ...`) with the address 'auto'"
        )
    return resolved


@contextlib.contextmanager
def _keeping_sigterm() -> Iterator[None]:
    """Keep Ray from answering SIGTERM meanwhile.

    Its handler exits with the status 15, whatever the program would do, and an exit that C code swallows is lost.
    """
    from ray._private import utils

    theirs = utils.set_sigterm_handler
    utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = theirs


@_keeping_sigterm()
def connect(
    address: str | None,
    or_else: str = ", or use the address 'ray' without RAY_ADDRESS to have one started here",
    deadline: float = _ANSWER_PATIENCE,
) -> bool:
    """Join a cluster, or start one if ``address`` is None; return whether it was started.

    Args:
        address: the address of a running cluster.
        or_else: what else to do where there is none, for the error.
        deadline: seconds for its head to answer, if they are fewer than those that nrl gives it.

    Raises:
        PlacementError: there is none at this address, it asks for a token, or Ray does not start here.
    """
    import ray

    logs.silence_ray()
    terminate = signal.getsignal(signal.SIGTERM)
    origin = ""
    try:
        if address:
            head, origin = _locate_head(address)
            _check_head_answers(head, min(deadline, _ANSWER_PATIENCE))
            ray.init(address=address, configure_logging=False)
        else:
            _start(attempts=3)
        if threading.current_thread() is threading.main_thread():  # Ray's handler aborts, and leaves no `with` block
            signal.signal(signal.SIGTERM, terminate if callable(terminate) else _exit_on_signal)
    except Exception as error:  # Ray raises all kinds, plain Exception among them
        ray.shutdown()
        if not address:
            raise PlacementError(f"cluster: Ray does not start on this machine: {_first_line(error)}") from error
        if _needs_token(error):
            raise PlacementError(
                f"cluster: the Ray cluster at '{address}' asks for a token; set RAY_AUTH_MODE=token, and "
                "RAY_AUTH_TOKEN_PATH if the token is not in ~/.ray/auth_token"
            ) from error
        if origin:
            raise PlacementError(
                f"cluster: no head of a Ray cluster answers at {head} ({_first_line(error)}), where {origin}. Start "
                f"one with `ray start --head` or give the host:port of another one{or_else}"
            ) from error
        raise PlacementError(
            f"cluster: there is no Ray cluster at '{address}' ({_first_line(error)}); start one with "
            f"`ray start --head`{or_else}"
        ) from error
    logs.install_echo()
    if address:
        print(f"cluster: joined Ray at {ray.get_runtime_context().gcs_address}; {available_resources()}", flush=True)  # noqa: T201
    return not address


def disconnect() -> None:
    """Leave the cluster, which ends if it was started here."""
    import ray

    ray.shutdown()
    if signal.getsignal(signal.SIGTERM) is _exit_on_signal and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exit_on_signal(number: int, frame: Any) -> None:
    """Exit by an exception, so that `with` blocks are left, with the status that a shell gives."""
    sys.exit(128 + number)


def _needs_token(error: BaseException | None) -> bool:
    """Return whether an error, or a cause of it, is about authentication."""
    while error is not None:
        if "uthenticat" in f"{type(error).__name__} {error}":
            return True
        error = error.__cause__ or error.__context__
    return False


def _start(attempts: int) -> None:
    """Start Ray here, in several attempts: on a busy machine it may need more time than it gives itself."""
    import ray

    cpus = max(_CPUS, os.cpu_count() or 1)
    for attempt in range(1, attempts + 1):
        try:
            with _environment(_START_VARIABLES):
                ray.init(address="local", num_cpus=cpus, include_dashboard=False, configure_logging=False)
            return
        except Exception as error:  # Ray raises a plain one if its own processes are slow.
            ray.shutdown()
            if attempt == attempts:
                raise RuntimeError(_first_line(error)) from error


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set those variables that have no value, for processes that start in the block."""
    new = variables.keys() - os.environ.keys()
    os.environ.update({name: variables[name] for name in new})
    try:
        yield
    finally:
        for name in new:
            os.environ.pop(name, None)


def _locate_head(address: str) -> tuple[str, str]:
    """Return the ``host:port`` of an address, and for ``"auto"`` its source: Ray would try for a quarter of an hour."""
    if address != "auto":
        return address, ""
    from ray._private import services, utils

    # Ray caches the addresses of heads that are gone by now.
    services.find_gcs_addresses.cache_clear()  # type: ignore[attr-defined]
    head = services.get_ray_address_from_environment(address, None)  # Ray raises if there is no address.
    file = utils.get_ray_address_file(None)  # type: ignore[attr-defined]
    if head == utils.read_ray_address(None):
        return head, f"the file {file} says that it is; that is stale: delete it, or end what is left by `ray stop`"
    return head, "processes of Ray on this machine look for it; they are left over: end them by `ray stop`"


def _check_head_answers(address: str, seconds: float) -> None:
    """Check that a gRPC server answers at ``host:port``: Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=seconds) as connection:
            connection.sendall(_PREFACE)
            try:
                connection.recv(1)  # Any reply will do: with TLS, an alert, or the end.
            except TimeoutError:
                raise TimeoutError(f"something listens there, and says nothing for {seconds:g} s") from None


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def list_nodes(alive: bool = True) -> list[dict[str, Any]]:
    """Return Ray's records of the nodes that are alive, or of those that it has lost."""
    import ray

    return [node for node in ray.nodes() if node["Alive"] == alive]


def available_resources(gpus: bool = False) -> str:
    """Return a line on the cluster's nodes and resources, and free ones; ``gpus``: name GPUs even if none exist."""
    import ray

    kinds = [kind for kind in ("GPU", "CPU") if kind == "CPU" or gpus or ray.cluster_resources().get(kind)]

    def format_resources(resources: Mapping[str, float]) -> str:
        return ", ".join(f"{resources.get(kind, 0):g} {kind}" for kind in kinds)

    nodes = list_nodes()
    has = "; ".join(f"node {node['NodeManagerAddress']}: {format_resources(node['Resources'])}" for node in nodes)
    return (
        f"the cluster has {len(nodes)} node(s) ({has}), of which {format_resources(ray.available_resources())} are free"
    )
