"""A Slurm of two nodes on this machine: each is a host of its own, but for the kernel, the disk and the processor.

A node has its own network, processes, name, /tmp, /run and shared memory. /mnt is a folder that both share, as a file
system of a cluster would be; the rest of the disk is the same for both.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.hosts import FIRST, SECOND, hosts

__all__ = ["Slurm", "slurm"]

_NODES = {"node-a": FIRST, "node-b": SECOND}
_CONF = """
ClusterName=nrl
SlurmctldHost=node-a({first})
SlurmUser=root
AuthType=auth/munge
AuthInfo=cred_expire=10
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=20
StateSaveLocation=/run/slurmctld
SlurmdSpoolDir=/run/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=/mnt/slurmctld.log
SlurmdLogFile=/mnt/slurmd-%n.log
SlurmdParameters=config_overrides
MpiDefault=none
JobRequeue=1
NodeName=node-a NodeAddr={first} CPUs=1 State=UNKNOWN
NodeName=node-b NodeAddr={second} CPUs=1 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=60 State=UP
"""
_BOOT = """
set -e
hostname "$1"
mount --make-rprivate /
mount -t proc proc /proc
mount --bind "$2/hosts" /etc/hosts
mount -t tmpfs shm /dev/shm
mount -t tmpfs run /run
mount -t tmpfs cgroup /sys/fs/cgroup # slurmd wants to find something here
mount --bind "$2/shared" /mnt
mount --bind "$2/$1" /tmp
install -d -o munge -g munge /run/munge
runuser -u munge -- munged --socket=/run/munge/munge.socket.2 --pid-file=/run/munge/munged.pid \
    --log-file=/run/munge/munged.log --seed-file=/run/munge/seed
mkdir /run/slurmctld /run/slurmd
[ "$1" != node-a ] || slurmctld -f /mnt/slurm.conf
slurmd -f /mnt/slurm.conf -N "$1"
echo up
while :; do sleep 3600 & wait; done
"""


class Slurm(NamedTuple):
    """A cluster that is up.

    Args:
        shared: the folder that is /mnt on the nodes.
        enter: the words before a command that is run on the first node.
    """

    shared: Path
    enter: tuple[str, ...]

    def __call__(self, *words: str, check: bool = True) -> str:
        """What a command says that is run on the first node."""
        path = f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"
        env = {"HOME": os.environ["HOME"], "PATH": path, "LANG": "C.UTF-8", "SLURM_CONF": "/mnt/slurm.conf"}
        env |= {"OMP_NUM_THREADS": "1", "UV_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
        found = subprocess.run([*self.enter, *words], env=env, capture_output=True, text=True, timeout=60)
        assert not check or found.returncode == 0, f"{words}: {found.stdout}{found.stderr}"
        return found.stdout.strip()


@contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """A Slurm until the block is left; skips the test where there is none installed.

    Args:
        folder: for what belongs to the nodes.
    """
    if missing := [each for each in ("slurmctld", "slurmd", "sbatch", "munged") if shutil.which(each) is None]:
        pytest.skip(f"a Slurm needs {', '.join(missing)}, of Debian's slurmctld, slurmd, slurm-client and munge")
    for each in ("shared", *_NODES):
        (folder / each).mkdir(parents=True)
        (folder / each).chmod(0o1777)
    shared = folder / "shared"
    (shared / "slurm.conf").write_text(_CONF.format(first=FIRST, second=SECOND))
    (shared / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # which Slurm 22.05 reads whatever it tracks by
    names = "".join(f"{address} {name}\n" for name, address in _NODES.items())
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
    with ExitStack() as stack:
        cable = stack.enter_context(hosts(0, 0))
        nodes = []
        for name, host in zip(_NODES, cable, strict=True):
            apart = ["unshare", "--mount", "--pid", "--fork", "--uts", "--ipc", "--kill-child"]
            words = [*host.enter, *apart, "bash", "-c", _BOOT, "boot", name, str(folder)]
            node = stack.enter_context(subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
            stack.callback(node.kill)
            assert node.stdout is not None
            assert node.stdout.readline() == "up\n", f"{name} does not start; see above, and {shared}"
            nodes.append(int(Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text()))
        up = Slurm(shared, ("nsenter", f"--target={nodes[0]}", "--all", "--wdns=/mnt"))
        until = time.monotonic() + 60
        while up("sinfo", "-h", "-t", "idle", "-o", "%D", check=False) != "2":
            assert time.monotonic() < until, f"the nodes are not idle: {up('sinfo')}; see {shared}"
            time.sleep(0.5)
        yield up
