"""Machines of this one: each has its own network, processes, host name, ``/tmp``, home, ``/run`` and ``/dev/shm``.

They share the kernel, its clock, and what they only read: the interpreter and this checkout. They need root, Linux,
iproute2 and util-linux. All of one is gone with its first process, which ends with its standard input.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import attrs
import pytest

from tests.hosts import cable
from tests.processes import settled

__all__ = ["ADDRESSES", "Machines", "machines"]

ADDRESSES = {"a": "198.18.7.1", "b": "198.18.7.2", "c": "198.18.7.3"}
"""Where they reach one another, in a network that is kept for tests of networks."""

_ATTEMPTS = 3
_ROOT = Path(__file__).parents[1]
_NAMESPACES = ("--net", "--mount", "--pid", "--fork", "--uts", "--ipc", "--kill-child")
_BOOT = r"""
set -e
name=$1 disk=$2; shift 2
hostname "host-$name"
mount --make-rprivate /
for kept; do mkdir -p "$disk$kept"; mount --bind "$kept" "$disk$kept"; done
mount -t proc proc /proc
mount --bind "$disk/hosts" /etc/hosts
mount -t tmpfs -o size=2g shm /dev/shm
mount --rbind "$disk$HOME" "$HOME"
mount -t tmpfs run /run
mount --rbind "$disk/tmp" /tmp
ip link set lo up
echo up
read -r _ || true
"""


@attrs.define
class Machines:
    """Some machines with a switch between them.

    Args:
        folder: for their disks.
        switch: the words that enter the network of the switch.
        first: of each that is on, its first process.
    """

    folder: Path
    switch: tuple[str, ...]
    first: dict[str, subprocess.Popen[str]] = attrs.field(factory=dict)

    def boot(self, name: str) -> None:
        """Switch one on; its disk is as it was."""
        disk, home = self.folder / name, Path.home()
        for each in (disk / "tmp", Path(f"{disk}{home}")):
            each.mkdir(parents=True, exist_ok=True)
        lines = ["127.0.0.1 localhost", f"127.0.1.1 host-{name}"]  # as an installer of Debian has it
        lines += [f"{address} host-{other}" for other, address in ADDRESSES.items() if other != name]
        (disk / "hosts").write_text("\n".join([*lines, ""]))
        hidden = (home, Path("/tmp"))
        kept = [path for path in _read() if any(path.is_relative_to(each) for each in hidden)]
        words = ["unshare", *_NAMESPACES, "bash", "-c", _BOOT, "boot", name, str(disk), *map(str, kept)]
        made = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.first[name] = made
        assert made.stdout is not None
        assert made.stdout.readline() == "up\n", "it says why on standard error"
        port = f"port-{name}"
        self._ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(self._pid(name)))
        self._ip("link", "set", port, "master", "br0", "up")
        for rest in (["addr", "add", f"{ADDRESSES[name]}/24", "dev", "eth0"], ["link", "set", "eth0", "up"]):
            subprocess.run([*self.words(name), "ip", *rest], check=True)

    def off(self, name: str) -> None:
        """Take its power away: every process of it is gone at once."""
        made = self.first.pop(name)
        made.kill()
        made.communicate()
        subprocess.run([*self.switch, "ip", "link", "del", f"port-{name}"], capture_output=True)

    def down(self) -> None:
        """Switch all of them off."""
        for name in list(self.first):
            self.off(name)

    def plug(self, name: str, *, into: bool) -> None:
        """Put its cable into the switch, or take it out."""
        self._ip("link", "set", f"port-{name}", "up" if into else "down")

    @contextmanager
    def narrow(self, name: str, megabytes: float) -> Iterator[None]:
        """Until the block is left, so many megabytes a second go through its cable, each way."""
        ends = [([*self.switch, "tc"], f"port-{name}"), ([*self.words(name), "tc"], "eth0")]
        for tc, device in ends:
            rate = ["rate", f"{round(8 * megabytes * 1e6)}bit", "burst", "128kb", "latency", "200ms"]
            subprocess.run([*tc, "qdisc", "add", "dev", device, "root", "tbf", *rate], check=True)
        try:
            yield
        finally:
            for tc, device in ends:
                subprocess.run([*tc, "qdisc", "del", "dev", device, "root"], check=True)

    @contextmanager
    def far(self, name: str, milliseconds: float, percent: float) -> Iterator[None]:
        """Until the block is left, a frame to or from it takes so long, and so many of a hundred are lost."""
        port, bridge, ends = f"port-{name}", f"far-{name}", (f"near-{name}", f"away-{name}")
        with cable(milliseconds, percent, ends, self.switch):
            self._ip("link", "add", bridge, "type", "bridge")
            for device, to in zip((*ends, port), ("br0", bridge, bridge), strict=True):
                self._ip("link", "set", device, "master", to, "up")
            self._ip("link", "set", bridge, "up")
            try:
                yield
            finally:
                self._ip("link", "set", port, "master", "br0")
                self._ip("link", "del", bridge)

    @contextmanager
    def firewalls(self, *ports: str) -> Iterator[None]:
        """Until the block is left, each drops what would connect to other ports of TCP, such as ``10002:19999``."""
        allowed = ["-m", "multiport", "!", "--dports", ",".join(ports)]
        rule = ["INPUT", "-i", "eth0", "-p", "tcp", "--syn", *allowed, "-j", "DROP"]
        there = list(self.first)
        for name in there:
            self.run(name, "iptables", "-A", *rule)
        try:
            yield
        finally:
            for name in there:
                self.run(name, "iptables", "-D", *rule)

    @contextmanager
    def picking(self, first: int, last: int) -> Iterator[None]:
        """Until the block is left, their systems pick ports of this range, and Ray was started anew with them."""
        file = "/proc/sys/net/ipv4/ip_local_port_range"
        before = self.run("a", "cat", file).strip()
        try:
            self._picks(f"{first} {last}", file)
            yield
        finally:
            self._picks(before, file)

    def _picks(self, said: str, file: str) -> None:
        for name in self.first:
            self.run(name, "ray", "stop", "--force")
            self.run(name, "sh", "-c", f"echo {said} >{file}")
        for name in self.first:
            self.ray(name)

    def carried(self, name: str) -> int:
        """How many bytes have gone through its cable since it was switched on."""
        words = [*self.switch, "ip", "-json", "-statistics", "link", "show", f"port-{name}"]
        (found,) = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
        return sum(found["stats64"][way]["bytes"] for way in ("rx", "tx"))

    def words(self, name: str) -> tuple[str, ...]:
        """The words before a command that is to run there."""
        return ("nsenter", f"--target={self._pid(name)}", "--all", f"--wdns={_ROOT}")

    def start(self, name: str, words: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start a command there, with a small environment of its own; both outputs are one."""
        given = {
            "HOME": str(Path.home()),
            "PATH": f"{Path(sys.executable).parent}:{os.defpath}:/usr/sbin:/sbin",
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "UV_OFFLINE": "1",
        }
        command = [*self.words(name), "env", "-i", *(f"{k}={v}" for k, v in {**given, **(env or {})}.items()), *words]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def run(self, name: str, *words: str, env: Mapping[str, str] | None = None, seconds: float = 300) -> str:
        """What a command wrote there that ended well."""
        made = self.start(name, words, env)
        out, _ = made.communicate(timeout=seconds)
        assert made.returncode == 0, out
        return out

    def ray(self, name: str, cpus: int = 1) -> None:
        """Start Ray there: the head on ``a``, and others as nodes of it."""
        how = (
            ["--head", "--port=6379", "--include-dashboard=false"]
            if name == "a"
            else [f"--address={ADDRESSES['a']}:6379"]
        )
        how += [f"--node-ip-address={ADDRESSES[name]}", f"--num-cpus={cpus}", "--object-store-memory=300000000"]
        for attempt in range(_ATTEMPTS):  # a busy machine may need more time than Ray gives itself
            try:
                self.run(name, "ray", "start", *how, "--disable-usage-stats")
                return
            except AssertionError:
                if attempt == _ATTEMPTS - 1:
                    raise
                self.run(name, "ray", "stop", "--force")

    def _pid(self, name: str) -> int:
        """Of its first process, which `unshare` waits for."""
        pid = self.first[name].pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def _ip(self, *words: str) -> None:
        subprocess.run([*self.switch, "ip", *words], check=True)


@contextmanager
def machines(folder: Path, names: str = "ab") -> Iterator[Machines]:
    """Machines, until the block is left; skips the test where there cannot be any."""
    if missing := [each for each in ("ip", "nsenter", "unshare") if shutil.which(each) is None]:
        pytest.skip(f"a second machine needs the command {missing[0]}, of iproute2 and util-linux")
    tried = subprocess.run(["unshare", *_NAMESPACES, "ip", "link", "add", "br0", "type", "bridge"], capture_output=True)
    if tried.returncode:
        pytest.skip(f"a second machine needs root, and namespaces with bridges: {tried.stderr.decode().strip()}")
    with ExitStack() as stack:
        switch = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        stack.callback(switch.communicate)
        made = Machines(folder, ("nsenter", f"--net=/proc/{switch.pid}/ns/net"))
        _settled(switch.pid)
        made._ip("link", "add", "br0", "type", "bridge")
        made._ip("link", "set", "br0", "up")
        stack.callback(made.down)
        for name in names:
            made.boot(name)
        yield made


def _settled(pid: int) -> None:
    """Wait until a process has a network of its own."""
    own = Path("/proc/self/ns/net").readlink()
    assert not settled(lambda: Path(f"/proc/{pid}/ns/net").readlink() == own, 30)


def _read() -> list[Path]:
    """What machines read of this one."""
    return sorted({Path(sys.base_prefix), Path(sys.prefix), _ROOT})
