"""How clients find a gym: by its file, its head's address, and what the head says."""

import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import attrs
import pytest

from nrl.errors import ConfigError, EnvError
from nrl.gym.config.resolving import Replicas, find, resolve
from nrl.gym.config.run_registry import Place, places, told

SERVERS = [
    {
        "name": "math", "kind": "environment", "auth": "token",
        "replicas": [{"url": "http://0.0.0.0:41"}, {"url": "http://[::]"}, {"url": ""}],
    },
    {"name": "open", "kind": "environment", "auth": "none", "replicas": [{"url": "http://10.0.0.5:42"}]},
    {"name": "far", "kind": "endpoint", "auth": None, "replicas": [{"url": "http://b:9000"}]},
    {"name": "judge", "kind": "model", "auth": None, "replicas": [{"url": "http://judge/v1"}]},
]  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NRL_GYM_DIR", str(tmp_path / "gyms"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gym.yaml").write_text("servers: {}")
    return tmp_path / "gyms"


@contextmanager
def a_head(status: int, body: Any) -> Iterator[tuple[int, list[str | None]]]:
    """The port of a server that answers so, and what it is shown."""
    shown = list[str | None]()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            shown.append(self.headers.get("authorization"))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server.server_port, shown
    server.shutdown()
    thread.join()
    server.server_close()


def place(folder: Path, port: int, token: str | None = None) -> Place:
    return Place(f"http://127.0.0.1:{port}", token, os.getpid(), (str(folder.parent / "gym.yaml"),))


def test_the_gyms_of_another_host_that_shares_the_folder_are_left_alone(folder: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    far = [attrs.evolve(place(folder, 9), pid=pid, host="node/7") for pid in (os.getpid(), dead.pid)]
    with told(far[0]), told(far[1]), told(place(folder, 8)):
        assert places() == [place(folder, 8)]
        assert len(list(folder.iterdir())) == 3
    assert not list(folder.iterdir())


def test_gyms_from_before_the_machine_started_again_are_forgotten(folder: Path) -> None:
    """Though another process has the number now."""
    with told(attrs.evolve(place(folder, 9), boot="another")) as path:
        assert places() == []
        assert not path.exists()


def test_only_its_user_reads_the_file_of_a_gym(folder: Path) -> None:
    here = place(folder, 9, "token-of-the-gym")
    with told(here) as path:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert places() == [here]
        assert "token-of-the-gym" not in repr(here)
        path.with_suffix(".new").touch()  # of a process that was killed while it wrote
        with told(here):
            assert places() == [here]
    assert places() == []


def test_the_folder_is_by_default_that_of_states(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NRL_GYM_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "states"))
    with told(place(tmp_path, 9)) as path:
        assert path.parent == tmp_path / "states" / "nrl" / "gyms"


def test_files_of_gyms_that_were_killed_are_removed(folder: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    folder.mkdir()
    (folder / "1.json").write_text("{")
    with told(Place("http://a", None, ended.pid, ())) as path:
        assert places() == []
        assert not path.exists()
    (folder / "2.json").write_text(json.dumps({"url": "http://init", "token": None, "pid": 1, "files": []}))
    assert [each.pid for each in places()] == [1]  # somebody else's process, perhaps


@pytest.mark.parametrize("port", [0, None])
def test_a_client_finds_servers(folder: Path, port: int | None) -> None:
    with a_head(200, {"ready": False, "servers": SERVERS}) as (its, shown), told(place(folder, its, "abc")):
        found = resolve(["gym.yaml", f"head_server.port={its if port is None else port}"])
        assert shown == ["Bearer abc"]
    assert found == {
        "math": Replicas("environment", ("http://127.0.0.1:41", "http://127.0.0.1"), "abc"),
        "open": Replicas("environment", ("http://10.0.0.5:42",), ""),  # not None, for which `remote` takes another's
        "far": Replicas("endpoint", ("http://b:9000",), ""),
        "judge": Replicas("model", ("http://judge/v1",)),
    }
    assert "abc" not in repr(found)


def test_a_client_needs_the_token_of_a_server_elsewhere_and_no_other_secret(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder.parent / "gym.yaml").write_text(
        "servers:\n  far: {url: 'http://b', token: '${far}'}\n  judge: {model: '${no}'}"
    )
    monkeypatch.setenv("FAR", "far-away")
    with a_head(200, {"ready": True, "servers": SERVERS}) as (its, _), told(place(folder, its, "abc")):
        assert resolve(["gym.yaml", "head_server.port=0"])["far"].token == "far-away"
        monkeypatch.delenv("FAR")
        with pytest.raises(ConfigError, match=r"servers.far.token: \$\{far\}: there is no far; give far=VALUE, or"):
            resolve(["gym.yaml", "head_server.port=0"])


def test_a_client_elsewhere_gives_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYM_TOKEN", "known-to-all-of-us")
    with a_head(200, {"ready": True, "servers": SERVERS}) as (port, shown):
        resolve(["gym.yaml", f"head_server.port={port}", "token=${gym_token}"])
        resolve(["gym.yaml", f"head_server={{port: {port}, host: localhost}}", "auth=none"])
    assert shown == ["Bearer known-to-all-of-us", None]


def test_a_head_that_listens_everywhere_is_asked_here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = ["gym.yaml", "head_server={host: 0.0.0.0, port: 9}", "token=${gym_token}"]
    monkeypatch.setenv("GYM_TOKEN", "known-to-all-of-us")
    assert find(args).url == "http://127.0.0.1:9"
    with told(Place("http://0.0.0.0:9", "known", os.getpid(), ())):
        assert find(args).url == "http://127.0.0.1:9"
        assert find(["gym.yaml", "head_server={host: '::1', port: 9}"]).url == "http://[::1]:9"


def test_the_only_gym_needs_no_name(folder: Path) -> None:
    with pytest.raises(ConfigError, match="no gym of yours runs here; start one: nrl gym run CONFIG.yaml"):
        find([])
    here, other = place(folder, 9), Place("http://127.0.0.1:10", None, os.getppid(), ("/b.yaml",))
    with told(here):
        assert find([]) == here
        with told(other), pytest.raises(ConfigError, match="2 gyms run here; name the configuration of one:\n    /"):
            find([])


def test_a_gym_is_known_by_its_files_unless_its_head_is_named(folder: Path) -> None:
    here, other = place(folder, 9), Place("http://127.0.0.1:10", None, os.getppid(), ("/b.yaml",))
    with told(here), told(other):
        assert find(["gym.yaml"]) == here  # and not at 11000
        assert find(["gym.yaml", "head_server.port=10"]).url == other.url
        assert find(["gym.yaml", "head_server.port=8"]).pid == 0
    with told(here), told(attrs.evolve(other, files=here.files)):
        with pytest.raises(ConfigError, match=r"2 gyms of /.*gym.yaml run here; say which one, with head_server.port"):
            find(["gym.yaml"])
        (folder.parent / "gym.yaml").write_text("head_server: {port: 9}")
        assert find(["gym.yaml"]) == here
    with told(attrs.evolve(other, url="http://127.0.0.1:9")):
        assert find(["gym.yaml"]).pid == other.pid  # of other files, at its address


def test_what_is_wrong_with_a_head_is_told(folder: Path) -> None:
    def told_of(status: int, body: Any) -> str:
        with a_head(status, body) as (port, _), pytest.raises((ConfigError, EnvError)) as error:
            resolve(["gym.yaml", f"head_server.port={port}"])
        return str(error.value)

    assert "asks for its token; give it as token: '${gym_token}' in the configuration, or ask as" in told_of(401, {})
    assert "answers 200, and not as the head of a gym does; is head_server.port right?" in told_of(200, [])
    assert "answers 404, and not as the head" in told_of(404, {})
    with pytest.raises(
        ConfigError, match=r"no gym answers at http://127.0.0.1:1 \(.+\); start it: nrl gym run /.*gym.y"
    ):
        resolve(["gym.yaml", "head_server.port=1"])
    with pytest.raises(ConfigError, match=r"no gym of /.*gym.yaml runs here; start it: nrl gym run gym.yaml"):
        resolve(["gym.yaml", "head_server.port=0"])
