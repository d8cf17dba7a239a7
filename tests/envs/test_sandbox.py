"""What a program in a sandbox tries to do to the machine, and does not get done. Each probe runs as root and as a user.

On a machine where the tests are no root, both are a user.
"""

import os
import pickle
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import attrs
import pytest

from nrl.envs.sandbox import Channel, Finished, Limits, Sandbox, bubblewrap
from nrl.envs.sandbox.namespaces import _another_user
from nrl.envs.sandbox.seccomp import seccomp_filter
from nrl.errors import EnvError
from tests.envs.sandboxes import become_user, probed
from tests.processes import alive, descendants, settled

type Probe = Callable[..., str]

SLOW_START = """
words = sys.argv[1:]
args = os.read(int(words[1]), 1 << 20).decode().split("\\0")
status = int(args[args.index("--json-status-fd") + 1])
os.write(status, b'{"child-pid": %d}\\n' % os.getpid())  # it is still where the machine's files are
time.sleep(0.3)
os.lseek(int(words[1]), 0, os.SEEK_SET)
os.execv(REAL, ["bwrap", *words])
"""
LIMITS = Limits(seconds=200.0, cpu_seconds=100.0)
NOWHERE = "/nowhere-that-is"


@pytest.fixture(scope="module")
def user() -> Iterator[ProcessPoolExecutor]:
    """A process that is no root."""
    with ProcessPoolExecutor(1, get_context("spawn"), become_user) as pool:
        yield pool


@pytest.fixture(params=["own", "user"])
def attempt(request: pytest.FixtureRequest) -> Callable[..., Finished]:
    """Runs a program in a sandbox that this process made, and in one that a user without any rights did."""
    if request.param == "own":
        return lambda program, limits=LIMITS, stdin=b"", files={}: probed(program, stdin, files, limits)
    pool: ProcessPoolExecutor = request.getfixturevalue("user")
    return lambda program, limits=LIMITS, stdin=b"", files={}: pool.submit(
        probed, program, stdin, files, limits
    ).result()


@pytest.fixture
def probe(attempt: Callable[..., Finished]) -> Probe:
    """What a program prints that is meant to end by itself."""

    def output(program: str, **options: object) -> str:
        done = attempt(program, **options)
        assert (done.status, done.code, done.stderr) == ("exited", 0, b""), done
        return done.stdout.decode().strip()

    return output


def tried(*statements: str) -> str:
    """A program that prints the kind of error of each statement; or that it worked."""
    parts = [
        f"try:\n    {each}\n    print('worked')\nexcept Exception as error:\n    print(type(error).__name__)"
        for each in statements
    ]
    return "\n".join(["import ctypes, os, resource, signal, socket, subprocess, time", *parts])


def test_a_program_runs_in_its_folder(probe: Probe) -> None:
    program = "import os, sys; print(os.getcwd(), open('a/b.txt').read(), sys.stdin.read()); open('a/c', 'w').close()"
    assert probe(program, stdin=b"in", files={"a/b.txt": b"text"}) == "/sandbox text in"


def test_a_program_is_nobody(probe: Probe) -> None:
    program = """
import os
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(os.getuid() == 0, os.getgid() == 0, [g for g in os.getgroups() if g != 65534])
print(*(int(status[name], 16) for name in ("CapEff", "CapPrm", "CapInh", "CapAmb")), status["NoNewPrivs"].strip())
"""
    assert probe(program) == "False False []\n0 0 0 0 1"


# --- Network


def test_there_is_no_network(probe: Probe) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        socket.create_connection(("127.0.0.1", port)).close()  # it can be reached from here
        program = tried(
            f"socket.create_connection(('127.0.0.1', {port}), 2)",
            "socket.create_connection(('1.1.1.1', 53), 2)",
            "socket.getaddrinfo('example.org', 80)",
            "socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)",  # to the host of a virtual machine: in no namespace
            "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
            "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
            "assert [name for _, name in socket.if_nameindex()] != ['lo']",
        )
        found = probe(program).split()
    assert found[0] in ("ConnectionRefusedError", "OSError")
    assert found[1:] == ["OSError", "gaierror", "OSError", "OSError", "OSError", "OSError"]


def test_abstract_sockets_of_the_machine_cannot_be_reached(probe: Probe) -> None:
    name = f"\0nrl-probe-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        program = tried(f"socket.socket(socket.AF_UNIX).connect({name!r})")
        assert probe(program) == "ConnectionRefusedError"


# --- Files


def test_files_of_the_machine_are_not_there(probe: Probe, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    program = f"""
import os
for path in ({str(tmp_path / "secret")!r}, "/etc/passwd", "/etc/shadow", "/etc/hosts", "/home", "/var", {__file__!r}):
    assert not os.path.exists(path), path
print(sorted(set(os.listdir("/")) - {{"root", "opt"}}))
"""
    allowed = {"bin", "dev", "etc", "lib", "lib64", "proc", "tmp", "usr", "sandbox"}
    assert set(eval(probe(program))) <= allowed


def test_nothing_but_the_work_folder_can_be_written(probe: Probe) -> None:
    program = """
import os
written = set()
for folder, _, _ in os.walk("/"):
    if folder.startswith(("/proc", "/sandbox", "/tmp")):
        continue
    try:
        with open(os.path.join(folder, "probe"), "w"):
            written.add(folder)
    except OSError:
        pass
print(written)
for library in (os.__file__, os.path.realpath("/proc/self/exe")):
    try:
        open(library, "r+b")
        print("opened", library)
    except OSError:
        pass
"""
    assert probe(program).split() == ["{'/dev/shm'}"]


def test_symbolic_links_do_not_lead_out(probe: Probe, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    program = tried(
        f"os.symlink({str(tmp_path / 'secret')!r}, 'link'); open('link').read()",
        "os.symlink('../../../../../../../../etc/shadow', 'other'); open('other').read()",
        f"open('/proc/self/root' + {str(tmp_path / 'secret')!r}).read()",
        f"open('/proc/1/root' + {str(tmp_path / 'secret')!r}).read()",
        "open('/proc/1/cwd/../etc/shadow').read()",
        "os.chroot('/sandbox')",
        "os.link('/proc/self/exe', 'hard')",
        f"os.symlink({NOWHERE!r}, 'out'); open('out', 'w').write('x')",
    )
    assert "worked" not in probe(program)
    assert not Path(NOWHERE).exists()
    assert (tmp_path / "secret").read_text() == "secret"


def test_what_is_written_ends_with_the_program(probe: Probe) -> None:
    program = """
import os
for folder in ("/sandbox", "/dev/shm"):
    print(os.listdir(folder))
    open(f"{folder}/a", "w").close()
"""
    assert [probe(program), probe(program)] == ["[]\n[]", "[]\n[]"]


@pytest.mark.parametrize("folder", ["/sandbox", "/dev/shm", "/tmp"])
def test_files_are_limited(probe: Probe, folder: str) -> None:
    program = f"""
written = 0
try:
    for each in range(64):
        with open(f"{folder}/{{each}}", "wb", buffering=0) as file:
            while written < 64 << 20:
                written += file.write(bytes(1 << 20))
except OSError as error:
    print(type(error).__name__)
print(written >> 20)
"""
    assert probe(program, limits=Limits(seconds=200, disk=4 << 20)).split() == ["OSError", "4"]


def test_empty_files_are_limited(attempt: Callable[..., Finished]) -> None:
    done = attempt(
        "n = 0\nwhile True:\n    open(f'{n}', 'w').close()\n    n += 1", Limits(seconds=200, cpu_seconds=100)
    )
    assert (done.status, done.code) == ("disk", None)


# --- Processes


BOMB = """
import os, time
made = 0
while made < 1000:
    try:
        if os.fork() == 0:
            time.sleep(3600)
        made += 1
    except BlockingIOError:
        print(made, flush=True)
        break
"""


def test_processes_are_limited(probe: Probe) -> None:
    """Those that it leaves sleeping are killed: else it would end with its limit, or never."""
    assert 10 <= int(probe(BOMB, limits=Limits(seconds=200, processes=16))) < 16


def test_threads_are_limited(probe: Probe) -> None:
    program = """
import threading, time
made = 0
try:
    while made < 1000:
        threading.Thread(target=time.sleep, args=(3,), daemon=True).start()
        made += 1
except RuntimeError:
    pass
print(made)
"""
    assert 10 <= int(probe(program, limits=Limits(seconds=200, processes=16))) < 16


def test_a_fork_bomb_is_gone_with_its_sandbox(attempt: Callable[..., Finished]) -> None:
    before = set(descendants(os.getpid()))
    done = attempt("import os\nwhile True:\n    try:\n        os.fork()\n    except OSError: pass", Limits(seconds=2))
    assert done.status in ("seconds", "cpu_seconds")
    assert not settled(lambda: bwraps(before), 60)


def bwraps(before: set[int]) -> list[int]:
    """What sandboxes have left since."""
    return [pid for pid in descendants(os.getpid()) if pid not in before and name(pid) == "bwrap"]


def name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def test_what_a_program_leaves_behind_is_killed(attempt: Callable[..., Finished]) -> None:
    program = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(3600)
    os._exit(0)
os.wait()
print("done", flush=True)
"""
    done = attempt(program)
    assert (done.status, done.stdout) == ("exited", b"done\n")


def test_kill_everything_kills_the_sandbox_alone(attempt: Callable[..., Finished]) -> None:
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        done = attempt("import os, signal; os.kill(-1, signal.SIGKILL); print('alive')")  # spares its caller
        assert done.status == "exited"
        done = attempt(
            f"import os, signal\nfor pid in ({bystander.pid}, {os.getpid()}, 1):\n    try:\n        os.kill(pid, 9)\n"
            "    except OSError as error: print(type(error).__name__, flush=True)\nos.killpg(0, 9)"
        )
        assert done.status == "exited"
        assert done.stdout.split()[:2] == [b"ProcessLookupError"] * 2  # it sees neither of those outside
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_other_processes_can_be_neither_seen_nor_traced(probe: Probe) -> None:
    program = tried(
        "assert [int(each) for each in os.listdir('/proc') if each.isdigit() and int(each) > 2]",
        "libc = ctypes.CDLL(None, use_errno=True); assert libc.ptrace(16, 1, 0, 0) == 0",  # PTRACE_ATTACH
        "assert libc.ptrace(0, 0, 0, 0) == 0",  # PTRACE_TRACEME
        "assert libc.syscall(310, 1, 0, 0, 0, 0, 0) >= 0 or ctypes.get_errno() != 1",
        "open('/proc/1/mem', 'r+b')",
        "open('/proc/1/environ').read()",
        "os.listdir('/proc/1')",
    )
    assert "worked" not in probe(program)


def test_proc_tells_and_changes_nothing(probe: Probe) -> None:
    program = tried(
        "os.write(os.open('/proc/sys/kernel/hostname', os.O_WRONLY), b'x')",
        "os.write(os.open('/proc/sys/vm/drop_caches', os.O_WRONLY), b'1')",
        "os.write(os.open('/proc/sysrq-trigger', os.O_WRONLY), b'h')",
        "open('/proc/kcore', 'rb').read(1)",
        "os.write(os.open('/proc/1/oom_score_adj', os.O_WRONLY), b'-1000')",
        "os.write(os.open('/proc/self/oom_score_adj', os.O_WRONLY), b'-1000')",
        "os.mkdir('/proc/x')",
        "open('/proc/kmsg').read(1)",
        "assert socket.gethostname() != 'sandbox'",
    )
    assert "worked" not in probe(program)


def test_no_namespace_and_no_right_can_be_got(probe: Probe) -> None:
    program = tried(
        "os.unshare(os.CLONE_NEWUSER) if hasattr(os, 'unshare') else exec('raise OSError')",
        "libc = ctypes.CDLL(None, use_errno=True); assert libc.unshare(0x10000000) == 0",
        "assert libc.mount(b'none', b'/sandbox', b'tmpfs', 0, None) == 0",
        "assert libc.umount2(b'/proc', 2) == 0",
        "assert libc.setns(0, 0) == 0",
        "os.setuid(0)",
        "os.setgroups([0])",
        "os.nice(-5)",
        "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
        "resource.setrlimit(resource.RLIMIT_NPROC, (-1, -1))",
        "assert libc.memfd_create(b'x', 0) >= 0",
        "assert libc.shmget(0, 4096, 0o1600) >= 0",
        "assert libc.add_key(b'user', b'a', b'b', 1, -4) >= 0",
        "assert libc.reboot(0) == 0",
    )
    assert "worked" not in probe(program)


# --- Limits


def test_memory_of_a_process_is_limited(probe: Probe) -> None:
    program = tried("bytearray(64 << 20)", "bytearray(512 << 20)")
    assert probe(program, limits=Limits(seconds=200, memory=256 << 20)).split() == ["worked", "MemoryError"]


def test_memory_of_all_processes_is_limited(attempt: Callable[..., Finished]) -> None:
    program = """
import os, time
for _ in range(8):
    if os.fork() == 0:
        held = bytearray(os.urandom(1 << 20) * 96)
        time.sleep(60)
time.sleep(60)
"""
    assert attempt(program, Limits(seconds=200, memory=256 << 20)).status == "memory"


def test_memory_that_processes_share_counts_once(probe: Probe) -> None:
    program = """
import os, time
held = bytearray(os.urandom(1 << 20) * 96)
children = [pid for _ in range(6) if (pid := os.fork()) or time.sleep(1) or os._exit(0)]
print(len([os.waitpid(pid, 0) for pid in children]))
"""
    assert probe(program, limits=Limits(seconds=200, memory=320 << 20)) == "6"


def test_processors_are_limited(attempt: Callable[..., Finished]) -> None:
    done = attempt("while True: pass", Limits(seconds=200, cpu_seconds=0.5))
    assert (done.status, done.code) == ("cpu_seconds", None)
    forks = "import os\nfor _ in range(3): os.fork()\nwhile True: pass"
    assert attempt(forks, Limits(seconds=200, cpu_seconds=1)).status == "cpu_seconds"


def test_children_that_have_ended_count(attempt: Callable[..., Finished]) -> None:
    program = """
import os, time
while True:
    if os.fork() == 0:
        until = time.process_time() + 0.2
        while time.process_time() < until: pass
        os._exit(0)
    os.wait()
"""
    assert attempt(program, Limits(seconds=200, cpu_seconds=1)).status == "cpu_seconds"


def test_time_is_limited(attempt: Callable[..., Finished]) -> None:
    done = attempt("import time; print('so far', flush=True); time.sleep(3600)", Limits(seconds=3))
    assert (done.status, done.code, done.stdout) == ("seconds", None, b"so far\n")
    assert 2.9 < done.seconds < 60


@pytest.mark.parametrize(
    "program",
    [
        "import signal, time\nfor each in (1, 2, 3, 13, 14, 15): signal.signal(each, signal.SIG_IGN)\ntime.sleep(3600)",
        "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
        "import os, time\nos.close(1), os.close(2), os.close(0)\ntime.sleep(3600)",
    ],
    ids=["deaf", "stopped", "silent"],
)
def test_no_program_outlives_its_time(attempt: Callable[..., Finished], program: str) -> None:
    done = attempt(program, Limits(seconds=1))
    assert done.status == "seconds"


def test_the_clock_cannot_be_set(probe: Probe) -> None:
    program = tried(
        "time.clock_settime(time.CLOCK_REALTIME, 0)",
        "libc = ctypes.CDLL(None, use_errno=True); assert libc.settimeofday(bytes(16), None) == 0",
        "assert libc.adjtimex(bytes(512)) >= 0",
    )
    assert "worked" not in probe(program)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_output_is_limited(attempt: Callable[..., Finished], stream: str) -> None:
    done = attempt(f"import sys\nwhile True: print('x' * 999, file=sys.{stream})", Limits(seconds=200, output=10_000))
    assert (done.status, done.code) == ("output", None)
    assert len(getattr(done, stream)) == 10_000
    assert getattr(done, stream).startswith(b"x" * 999 + b"\n")


@pytest.mark.parametrize("most", [1, 10])
def test_a_small_limit_of_output_is_that_of_the_program(attempt: Callable[..., Finished], most: int) -> None:
    """What bubblewrap says of it does not count."""
    done = attempt("import sys; print(end='x'); sys.exit(3)", Limits(seconds=200, output=most))
    assert (done.status, done.code, done.stdout) == ("exited", 3, b"x")
    done = attempt(f"print('x' * {most}, flush=True)\nwhile True: pass", Limits(seconds=200, output=most))
    assert (done.status, done.code, done.stdout) == ("output", None, b"x" * most)


def test_output_of_the_last_moment_counts(attempt: Callable[..., Finished]) -> None:
    done = attempt("print('x' * 5000)", Limits(seconds=200, output=1000))
    assert done._replace(seconds=0.0) == ("output", None, b"x" * 1000, b"", 0.0)


def test_a_limit_that_is_lower_already_stays() -> None:
    program = """
import resource
from nrl.envs.sandbox import Limits, bubblewrap
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
said = "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE))"
print(bubblewrap()(["python", "-c", said], b"", {}, Limits()).stdout)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "b'(200, 200)\\n'\n"


def test_time_may_be_over_before_the_program_starts(attempt: Callable[..., Finished]) -> None:
    assert attempt("print(1)", Limits(seconds=1e-6))._replace(seconds=0.0) == ("seconds", None, b"", b"", 0.0)


def test_the_environment_is_clean(probe: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NRL_PROBE_TOKEN", "secret")
    program = """
import os
started_with = [pair.split("=")[0] for pair in open("/proc/self/environ").read().split("\\0")]
print(*{*os.environ, *started_with})
"""
    named = {"HOME", "LANG", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PATH", "PWD", "TMPDIR"}
    assert set(probe(program).split()) == named


def test_no_file_of_this_process_is_open_there(probe: Probe, tmp_path: Path) -> None:
    with open(tmp_path / "open", "w") as file:  # noqa: PTH123
        os.set_inheritable(file.fileno(), True)
        program = "import os\nfor fd in range(256):\n    try: print(fd, os.readlink(f'/proc/self/fd/{fd}')[:4])\n"
        assert probe(program + "    except OSError: pass") == "0 pipe\n1 pipe\n2 pipe"


# --- The sandbox


def test_a_sandbox_that_takes_long_to_start_is_not_taken_for_the_machine(tmp_path: Path) -> None:
    slow = tmp_path / "bwrap"
    run = bubblewrap()
    real = run.args[0].bwrap  # type: ignore[attr-defined]
    slow.write_text(f"#!{sys.executable}\nimport os, sys, time\nREAL = {real!r}\n{SLOW_START}")
    slow.chmod(0o755)
    setup = attrs.evolve(run.args[0], bwrap=str(slow))  # type: ignore[attr-defined]
    done = run.func(setup, ["python", "-c", "print(1)"], b"", {}, LIMITS)  # type: ignore[attr-defined]
    assert (done.status, done.code, done.stdout) == ("exited", 0, b"1\n")


def test_exit_statuses_and_signals_are_told(attempt: Callable[..., Finished]) -> None:
    assert attempt("import sys; sys.exit(3)")[:2] == ("exited", 3)
    assert attempt("import os; os.kill(os.getpid(), 15)")[:2] == ("exited", 128 + 15)
    assert attempt("1 / 0").stderr.endswith(b"ZeroDivisionError: division by zero\n")


def test_input_that_nobody_reads_does_no_harm(probe: Probe) -> None:
    assert probe("print(1)", stdin=bytes(4 << 20)) == "1"
    assert probe("import sys; print(len(sys.stdin.buffer.read()))", stdin=bytes(4 << 20)) == str(4 << 20)


def test_a_dialogue_ends_the_program() -> None:
    said = []

    def talk(channel: Channel) -> None:
        for each in (b"2\n", b"3\n"):
            channel.send(each)
            said.append(channel.receive(10))
        with pytest.raises(TimeoutError, match=r"it wrote nothing within 0\.1 s"):
            channel.receive(0.1)

    program = "while True: print(int(input()) ** 2, flush=True)"
    done = bubblewrap()(["python", "-c", program], talk, {}, LIMITS)
    assert said == [b"4\n", b"9\n"]
    assert (done.status, done.code) == ("stopped", None)
    ended = bubblewrap()(
        ["python", "-c", "print(1)"], lambda channel: [*iter(lambda: channel.receive(10), b"")], {}, LIMITS
    )
    assert (ended.status, ended.code) == ("exited", 0)


def test_an_error_in_a_dialogue_kills_the_program() -> None:
    before = set(descendants(os.getpid()))
    with pytest.raises(ZeroDivisionError):
        bubblewrap()(["python", "-c", "import time; time.sleep(60)"], lambda channel: 1 / 0, {}, LIMITS)
    assert not settled(
        lambda: [each for each in descendants(os.getpid()) if each not in before and name(each) == "bwrap"], 60
    )


def test_a_sandbox_ends_with_its_process() -> None:
    program = """
import sys
from nrl.envs.sandbox import Limits, bubblewrap
print("started", flush=True)
bubblewrap()(["python", "-c", "import time; time.sleep(60)"], b"", {}, Limits(seconds=60))
"""
    outer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert outer.stdout is not None
    assert outer.stdout.readline() == b"started\n"
    inner = settled(lambda: len(descendants(outer.pid)) < 2, 60) or descendants(outer.pid)
    outer.kill()
    outer.wait()
    outer.stdout.close()
    assert isinstance(inner, list)
    assert len(inner) >= 2
    assert not settled(lambda: [each for each in inner if alive(each)], 60)


def test_paths_and_variables_can_be_given(tmp_path: Path) -> None:
    (tmp_path / "words.py").write_text("said = 'hello'")
    run = bubblewrap(paths=[tmp_path], environment={"PYTHONPATH": str(tmp_path)})
    run = pickle.loads(pickle.dumps(run))
    os.chmod(tmp_path, 0o755)  # noqa: PTH101
    assert run(["python", "-c", "import words; print(words.said)"], b"", {}, LIMITS).stdout == b"hello\n"


def test_a_command_that_is_not_there_is_the_programs_doing() -> None:
    assert bubblewrap()(["nothing-of-that-name"], b"", {}, LIMITS)[:2] == ("exited", 127)


# --- Errors


@pytest.mark.parametrize("given", ["/etc/x", "../x", "a/../../x", "", "a\0b"])
def test_files_lie_in_the_folder(given: str) -> None:
    with pytest.raises(EnvError, match="is no file of the work folder; give relative names without '..'"):
        bubblewrap()(["python"], b"", {given: b""}, LIMITS)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"seconds": 0}, "Limits: seconds is 0; give a positive number"),
        ({"cpu_seconds": float("nan")}, "Limits: cpu_seconds is nan; give a finite number"),
        ({"memory": 1.5}, "Limits: memory is 1.5; give a whole number"),
        ({"processes": -1}, "Limits: processes is -1; give a positive whole number"),
    ],
)
def test_limits_are_positive(wrong: Mapping[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Limits(**wrong)  # type: ignore[arg-type]


def test_without_bwrap_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *args, **options: None)
    with pytest.raises(EnvError, match=r"there is no bwrap on PATH; install it \(apt-get install bubblewrap,"):
        bubblewrap()


def test_a_path_that_is_not_there_is_an_error() -> None:
    with pytest.raises(EnvError, match="there is no /nowhere-that-is; give paths that exist"):
        bubblewrap(paths=[NOWHERE])


def test_root_without_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Path.read_text
    alone = lambda path, *args: "0 1000 1\n" if str(path) == "/proc/self/uid_map" else read(path, *args)  # noqa: E731
    monkeypatch.setattr(Path, "read_text", alone)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(EnvError, match="this process is root, and its user namespace has no other users"):
        bubblewrap()


def test_another_user_is_one_of_the_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path: "0 1000 1\n1 100000 65536\n")
    found = {_another_user() for _ in range(200)}
    assert len(found) > 150
    assert min(found) > 30_000
    assert max(found) < 65_535
    assert 65_534 not in found


def test_another_machine_has_no_filter() -> None:
    with pytest.raises(EnvError, match="no filter of system calls for riscv64, only for x86_64 and aarch64"):
        seccomp_filter("riscv64")


def test_a_sandbox_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    run: Sandbox = bubblewrap()
    setup = run.args[0]  # type: ignore[attr-defined]
    with pytest.raises(EnvError, match="could not be made: bwrap: No permissions to create new namespace; it needs"):
        run.func(attrs.evolve(setup, bwrap=str(broken)), ["python"], b"", {}, LIMITS)  # type: ignore[attr-defined]
    with pytest.raises(EnvError, match="bubblewrap: /nowhere-that-is cannot be started"):
        run.func(attrs.evolve(setup, bwrap=NOWHERE), ["python"], b"", {}, LIMITS)  # type: ignore[attr-defined]
