"""The image of deploy/Dockerfile, built by buildah from a local base, and what runs in it without a network.

It needs root, Linux, buildah and mmdebstrap; a network for Debian's packages and for those of the lock; and 20 GB.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from uv import find_uv_bin

ROOT = Path(__file__).parents[3]
EXECUTABLES = ("base", "mcore")
PACKAGES = "ca-certificates,libssl3,libffi8,libsqlite3-0,zlib1g,libbz2-1.0,liblzma5,libreadline8,libncursesw6,libuuid1"
LEFT_OUT = {"site-packages", "test", "__pycache__", "idlelib", "turtledemo"}
CANARY = "a-secret-that-no-image-has"
SECRETS = (".env", ".env.local", ".netrc", "key.pem")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

Buildah = Callable[..., str]
Inside = Callable[[str], str]


def run(*words: str | Path, **more: str) -> str:
    """What a command prints that ends well."""
    done = subprocess.run(
        [str(word) for word in words],
        env={**os.environ, "BUILDAH_ISOLATION": "chroot", **more},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{' '.join(map(str, words))}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout.strip()


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buildah]:
    """The command, with a store of its own that is gone in the end."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("an image is built by root, on Linux")
    if missing := [each for each in ("buildah", "mmdebstrap", "unshare", "ip") if shutil.which(each) is None]:
        pytest.skip(f"an image needs {', '.join(missing)}: `apt-get install buildah mmdebstrap util-linux iproute2`")
    store = tmp_path_factory.mktemp("store")
    options: list[str | Path] = ["--root", store / "root", "--runroot", store / "run", "--storage-driver", "overlay"]

    def call(*words: str | Path, enter: tuple[str, ...] = (), **more: str) -> str:
        return run(*enter, "buildah", *options, *words, **more)

    try:
        yield call
    finally:
        call("rm", "--all")
        call("rmi", "--all", "--force")
        subprocess.run(["umount", "-R", store / "root" / "overlay"], capture_output=True)
        shutil.rmtree(store, ignore_errors=True)


@pytest.fixture(scope="module")
def python_image(buildah: Buildah, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An image with Debian and this machine's Python 3.12, in place of `python:3.12-slim`, which a registry has."""
    place = tmp_path_factory.mktemp("base")
    home = Path(sys.base_prefix)

    def wanted(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if LEFT_OUT & {*Path(entry.name).parts} or entry.name.endswith(".a") else entry

    with tarfile.open(place / "python.tar", "w") as archive:
        for each in ("bin/python3.12", "lib", "include/python3.12"):
            archive.add(home / each, arcname=f"usr/local/{each}", filter=wanted)
    hooks = [
        f"tar -C $1 -xf {place / 'python.tar'}",
        "ln -s python3.12 $1/usr/local/bin/python3; mkdir -p $1/usr/local/lib/python3.12/site-packages",
        "chroot $1 ldconfig; chroot $1 /usr/local/bin/python3 -c 'import ssl, sqlite3, ctypes, lzma'",
    ]
    words = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={PACKAGES}"]
    run(*words, *(f"--customize-hook={each}" for each in hooks), "bookworm", place / "base.tar")
    container = buildah("from", "scratch")
    buildah("add", "--quiet", container, place / "base.tar", "/")
    path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    buildah("config", "--env", path, "--cmd", "python3", container)
    buildah("commit", "--quiet", "--rm", container, "localhost/python:3.12")
    return "localhost/python:3.12"


def copied(target: Path) -> Path:
    """A copy of what git has of this checkout."""
    for name in run("git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard").splitlines():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)
    return target


@pytest.fixture(scope="module")
def image(buildah: Buildah, python_image: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The target `release` of what git has of this checkout."""
    context = copied(tmp_path_factory.mktemp("context") / "src")
    for name in SECRETS:
        for folder in (context, context / "nrl" / "cli"):
            (folder / name).write_text(CANARY)
    for name in ("id_rsa", "notes.txt"):  # which nothing names
        (context / name).write_text(CANARY)
    secret = context.parent / "uv.toml"
    secret.write_text(f"# {CANARY}\nsystem-certs = true\n")
    pip = context.parent / "pip.conf"
    pip.write_text("[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n")
    started = time.monotonic()
    buildah(
        *("bud", "--quiet", "--pull-never", "--layers", "--file", context / "deploy" / "Dockerfile"),
        *("--target", "release", "--tag", "localhost/nrl:release"),
        *("--build-arg", f"PYTHON_IMAGE={python_image}", "--build-arg", f"EXECUTABLES={' '.join(EXECUTABLES)}"),
        *("--build-arg", "UV_COMPILE_BYTECODE=0"),  # minutes, for what a program here imports once
        *("--build-arg", "REVISION=abc123", "--secret", f"id=uv,src={secret}", "--secret", f"id=pip,src={pip}"),
        # this machine's certificates, for a network behind a proxy of its own
        *("--volume", "/etc/ssl/certs:/etc/ssl/certs:ro"),
        *("--volume", "/usr/local/share/ca-certificates:/usr/local/share/ca-certificates:ro", context),
    )
    print(f"built in {time.monotonic() - started:.0f} s")
    return "localhost/nrl:release"


def container(buildah: Buildah, image: str, *options: str) -> Inside:
    """Runs a line of a shell in a new container of the image, which has no network but its own loopback."""
    made = buildah("from", "--pull-never", image)
    alone = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$0" "$@"')

    def call(line: str) -> str:
        said = buildah("run", *options, made, "--", "bash", "-ec", line, enter=alone)
        print(said[-3000:])
        return said

    return call


@pytest.fixture(scope="module")
def inside(buildah: Buildah, image: str) -> Inside:
    """In one container for all tests that leave it as it was."""
    return container(buildah, image)


@pytest.fixture
def mounted(buildah: Buildah, image: str, tmp_path: Path) -> tuple[Path, Inside]:
    """A checkout to work on, and a container in which it lies over that of the image."""
    checkout = copied(tmp_path / "src")
    return checkout, container(buildah, image, "--volume", f"{checkout}:/src")


def test_its_configuration(buildah: Buildah, image: str) -> None:
    found = json.loads(buildah("inspect", "--type", "image", image))["OCIv1"]["config"]
    assert found["User"] == "nrl"
    assert found["WorkingDir"] == "/src"
    assert found["Labels"]["org.opencontainers.image.revision"] == "abc123"
    assert found["Labels"]["org.opencontainers.image.description"].endswith(f": {' '.join(EXECUTABLES)}")
    assert CANARY not in json.dumps(found)


def test_it_has_each_file_once_and_neither_caches_nor_secrets(inside: Inside) -> None:
    size = inside("id --user; du -sxm --total /src /venvs /driver | tail -n 1 | cut -f 1").splitlines()
    assert size[0] == "1000"
    assert int(size[1]) < 6500, "MB: the environments share no files"
    torch = "find /driver /venvs -name libtorch_cuda.so -printf '%i %n\\n' | sort -u"
    assert inside(torch).split()[1:] == [str(1 + len(EXECUTABLES))]  # one file, with a name in each environment
    left = "find ~nrl/.cache /tmp /var/lib/apt/lists /venvs/.making* /src/.git /src/tests -mindepth 1"
    assert inside(f"{left} 2>/dev/null || true") == ""
    secret = f"grep -rlsI {CANARY} / --exclude-dir=proc --exclude-dir=sys --exclude-dir=dev"
    assert inside(f"{secret} || true") == ""


def test_its_environments_are_what_the_checkout_says(inside: Inside) -> None:
    said = inside(f"nrl venvs check {' '.join(EXECUTABLES)}").splitlines()
    assert [each.partition(": ")[2] for each in said] == ["is complete, and is what the lock and the source say"] * 2


RUN = "steps=2 warmup=2 warmup_rows=8 prompts=4 group_size=4 eval_data=null"


def test_a_program_runs_without_a_network(inside: Inside) -> None:
    said = inside(f"UV_OFFLINE=1 OMP_NUM_THREADS=1 python examples/grpo.py {RUN} out=/tmp/local")
    assert "/tmp/local" in said


def test_ray_runs_two_executables_without_a_network(inside: Inside) -> None:
    program = f"python examples/grpo.py cluster=ray trainer=megatron {RUN} out=/tmp/two"
    said = inside(f"UV_OFFLINE=1 OMP_NUM_THREADS=1 {program} 2>&1 && wc -l < /tmp/two/metrics.jsonl")
    assert "building it" not in said  # the trainer runs in mcore, the sampler in base
    assert said.splitlines()[-1] == "2"


OF_THE_IMAGE = {
    **{name: ["ok"] for name in ("python", "uv", "lock", "mounts", "ray", "torch")},
    "environments": ["ok"] * len(EXECUTABLES),
    "hub": ["note"],
    "sandbox": ["note"],  # without bubblewrap
}
"""What the doctor says of the image; the rest is about the machine that it runs on."""


def test_the_doctor_finds_nothing_wrong_without_a_network(inside: Inside) -> None:
    said = inside("nrl doctor deadline=200")  # it exits with 0, or this raises
    assert re.search(r"(?m)^OK      lock          nrl's checkout, /src, with \d+ packages, which are all here in", said)
    assert re.search(r"(?m)^note    hub           .* does not answer \(.*\)\n {22}-> .*HF_HUB_OFFLINE=1", said)
    lines = said.splitlines()
    assert re.fullmatch(r"doctor: nothing failed, \d+ warnings, \d+ notes", lines.pop())
    document = json.loads(inside("nrl doctor deadline=200 --json"))
    assert document["failed"] is False
    shown = [line[8:22].strip().replace(" ", "_") for line in lines[1:] if not line.startswith(" ")]
    assert [each["check"] for each in document["findings"]] == shown
    levels = {name: [x["level"] for x in document["findings"] if x["check"] == name] for name in OF_THE_IMAGE}
    assert levels == OF_THE_IMAGE


# --- development: a checkout over that of the image

LOOKS = """
import nrl

def where(x):
    from nrl.batch import metrics
    print("found", metrics.__file__, metrics.EDITED, flush=True)
    return x

if __name__ == "__main__":
    import torch
    where(None)
    with nrl.cluster("ray", deadline=600) as cluster:
        mesh = cluster.reserve(1).mesh(executable="base", name="looks")
        nrl.shard_map(where, mesh, nrl.P("dp"), nrl.P("dp"))(torch.zeros(1))
"""


def test_the_source_of_a_mounted_checkout_runs_in_every_process(mounted: tuple[Path, Inside]) -> None:
    checkout, inside = mounted
    with (checkout / "nrl" / "batch" / "metrics.py").open("a") as file:
        file.write("\nEDITED = 'in the checkout'\n")
    (checkout / "examples" / "looks.py").write_text(LOOKS)
    check = "nrl venvs check base"
    told = r"is complete, and is what the lock says; the source of /src is (nrl-\S+), and not nrl-\S+: a program that "
    found = re.search(told + "starts puts it there, and builds nothing", inside(check))
    assert found
    # Elsewhere, since Ray puts the current folder first on the path of all processes
    said = inside("cd /tmp && UV_OFFLINE=1 OMP_NUM_THREADS=1 python /src/examples/looks.py 2>&1")
    assert re.findall(r"found (\S+) in the checkout", said) == [
        "/src/nrl/batch/metrics.py",
        f"/venvs/.sources/{found[1]}/nrl/batch/metrics.py",
    ]
    assert "building it" not in said
    assert inside(check).endswith("is complete, and is what the lock and the source say")


def test_a_changed_lock_is_told_from_the_image_to_the_checkout_before_anything_is_built(
    mounted: tuple[Path, Inside],
) -> None:
    checkout, inside = mounted
    old, new = version_of("xxhash", checkout), "3.6.0"
    again = ("--upgrade-package", f"xxhash=={new}")
    run(find_uv_bin(), "lock", "--quiet", f"--python={sys.executable}", f"--project={checkout}", *again)
    assert version_of("xxhash", checkout) == new != old
    before = inside("ls /venvs")
    said = inside(f"nrl venvs check {' '.join(EXECUTABLES)} || echo exits with $?").splitlines()
    assert said.pop() == "exits with 1"
    for name, line in zip(EXECUTABLES, said, strict=True):
        (there,) = re.findall(rf"(?m)^{name}-\w+$", before)
        assert re.match(rf"{name}-\w+: is not in /venvs, which has {there}, built \S+Z\. What that one has -> ", line)
        more = f"what the lock and the source of /src have: xxhash {old} -> {new}. Build what is missing with `nrl "
        assert f"{more}venvs build {name}`, or go back to the lock" in line
    assert inside("ls /venvs") == before
    said_too = inside("UV_OFFLINE=1 nrl venvs build base 2>&1 || echo exits with $?")
    assert f"xxhash {old} -> {new}. Only that is built now." in said_too
    assert "xxhash" in said_too.partition("was not found in the cache")[0].rpartition("Only that is built now.")[2]
    assert inside("ls /venvs") == before


def version_of(package: str, checkout: Path) -> str:
    (found,) = re.findall(rf'(?m)^name = "{package}"\nversion = "(.*)"$', (checkout / "uv.lock").read_text())
    return str(found)
