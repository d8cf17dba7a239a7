"""Folders with spaces and other characters that a shell reads, and hosts whose name is an address of their own."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
ODD = """my $(project); it's "mine" & yours"""

_ADDS_UP = """
import sys
import torch
import nrl
from nrl.runtime import P, shard_map

def doubled(x):
    return 2 * x, [sys.executable]

with nrl.cluster("ray", deadline=100) as cluster:
    mesh = cluster.reserve(2).mesh(executable="system", name="odd")
    total, where = shard_map(doubled, mesh, P("dp"), (P("dp"), P()))(torch.ones(4))
    print(total.result().sum().item(), where.result() == [sys.executable])
"""


def test_the_processes_of_a_project_start_whatever_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / ODD
    folder.mkdir()
    (folder / ".venv").symlink_to(Path(sys.prefix))
    (folder / "program.py").write_text(_ADDS_UP)
    python = folder / ".venv" / "bin" / "python"
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [str(python), "program.py"], cwd=folder, env=variables, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "8.0 True"


_ADDS_UP_OVER_HOSTS = """
import sys
import torch
import torch.distributed as dist
import nrl
from nrl.runtime import P, shard_map

def summed(x):
    total = x.clone()
    dist.all_reduce(total)
    return total

with nrl.cluster(sys.argv[1], deadline=100) as cluster:
    mesh = cluster.reserve(2, strategy="STRICT_SPREAD").mesh(executable="system", name="apart")
    print(shard_map(summed, mesh, P("dp"), P("dp"))(torch.ones(2)).result().tolist())
"""
_HOSTS = {"nrl-hard-a": "10.79.0.1", "nrl-hard-b": "10.79.0.2"}


@pytest.fixture
def hosts() -> Iterator[None]:
    """Two hosts with a cable between them: each is a network of its own, in which its name is 127.0.1.1."""

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True)

    with contextlib.ExitStack() as stack:
        for name in _HOSTS:
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name)
            names = Path("/etc/netns") / name  # `ip netns exec` puts what is there into /etc
            names.mkdir(parents=True)
            stack.callback(shutil.rmtree, names)
            (names / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n")
        one, two = _HOSTS
        ip("link", "add", "eth7", "netns", one, "type", "veth", "peer", "name", "eth7", "netns", two)
        for name, address in _HOSTS.items():
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth7")
            for interface in ("lo", "eth7"):
                ip("-n", name, "link", "set", interface, "up")
        yield


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="networks are made by root, with iproute2")
def test_processes_on_two_hosts_meet_where_each_says_that_it_is_127_0_1_1(hosts: None, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_ADDS_UP_OVER_HOSTS)
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    variables = {name: value for name, value in variables.items() if not name.endswith("_SOCKET_IFNAME")}
    (one, head), (two, other) = _HOSTS.items()
    ray = str(Path(sys.executable).parent / "ray")
    with contextlib.ExitStack() as stack:
        out = stack.enter_context((tmp_path / "out").open("w"))
        temporary = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True)
        )

        def on(host: str, *command: str) -> subprocess.Popen[str]:
            command = ("ip", "netns", "exec", host, *command)
            started = subprocess.Popen(command, env=variables, stdout=out, stderr=out, text=True)
            stack.callback(started.wait, 60)
            stack.callback(started.send_signal, signal.SIGTERM)
            return started

        start = (ray, "start", "--block", "--num-cpus=1", "--disable-usage-stats")
        on(one, *start, "--head", f"--node-ip-address={head}", "--port=6399", f"--temp-dir={temporary}")
        listening = f"import socket, time\nwhile socket.socket().connect_ex(('{head}', 6399)): time.sleep(0.1)"
        assert on(one, sys.executable, "-c", listening).wait(60) == 0
        on(two, *start, f"--node-ip-address={other}", f"--address={head}:6399")
        driver = on(one, sys.executable, str(program), f"{head}:6399")
        assert driver.wait(200) == 0, (tmp_path / "out").read_text()
        assert "[2.0, 2.0]" in (tmp_path / "out").read_text().splitlines()
