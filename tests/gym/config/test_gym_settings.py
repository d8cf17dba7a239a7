"""The configuration of a gym: files, arguments, references, secrets, and what is told of mistakes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from nrl.errors import ConfigError
from nrl.gym.config.servers import EnvironmentServer, Gym, ModelServer, executable_of, gym, head_of
from nrl.log.redaction import redact

BASE = """
policy_model_name: tiny
servers:
  math: {environment: math, options: {timeout: 3}}
  judge:
    model: http://10.0.0.5:8000/v1
    api_key: ${policy_api_key}
    name: ${policy_model_name}
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("POLICY_API_KEY", raising=False)

    def written(text: str = BASE, name: str = "gym.yaml") -> str:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return str(path)

    return written


def told(*args: str) -> str:
    with pytest.raises(ConfigError) as error:
        gym(args)
    return str(error.value)


def judge(made: Gym) -> ModelServer:
    found = made.servers["judge"]
    assert isinstance(found, ModelServer)
    return found


def math(made: Gym) -> EnvironmentServer:
    found = made.servers["math"]
    assert isinstance(found, EnvironmentServer)
    return found


def test_files_and_arguments_are_merged(write: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = write(), write("servers: {math: {replicas: 2}}\ndefault_host: localhost", "more.yaml")
    monkeypatch.setenv("POLICY_API_KEY", "nothing-much")
    made = gym([first, second, "servers.math.options.workers=4", "head_server.port=12000"])
    assert math(made).options == {"timeout": 3, "workers": 4}
    assert math(made).replicas == 2
    assert (made.default_host, made.head_server.port, made.host(made.head_server)) == ("localhost", 12000, "localhost")
    assert judge(made).name == "tiny"
    assert made.folder() == Path(first).parent
    assert gym([f"+config_paths=[{first},{second}]"]).servers["math"] == attrs_of(made)
    assert gym([f"config={first}"]).default_host == "127.0.0.1"


def attrs_of(made: Gym) -> EnvironmentServer:
    server = math(made)
    return EnvironmentServer(environment="math", options={"timeout": 3}, replicas=server.replicas)


def test_arguments_in_the_form_of_hydra(write: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    file = write()
    monkeypatch.setenv("POLICY_API_KEY", "nothing-much")
    assert "more" in gym([file, "+servers.more={environment: exact, replicas: 2}"]).servers
    assert math(gym([file, "++servers.math.replicas=3", "++servers.math.port=9000"])).port == 9000
    assert list(gym([file, "~servers.judge"]).servers) == ["math"]
    assert math(gym([file, "~servers.math.options"])).options == {}
    assert told(file, "+servers.math.environment=exact") == (
        "+servers.math.environment: it is there already; write servers.math.environment=VALUE, or "
        "++servers.math.environment=VALUE to add or override it"
    )
    assert told(file, "~servers.mth") == "~servers.mth: there is no such key to remove; did you mean math?"
    assert told(file, "~nowhere.at.all") == "~nowhere.at.all: there is no such key to remove"


def test_texts_of_arguments_have_the_types_of_their_fields(
    write: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLICY_API_KEY", "12345678")
    made = gym([write(), "policy_model_name=1e5", "deadline=1e2"])
    assert (judge(made).name, judge(made).api_key, made.deadline) == ("1e5", "12345678", 100.0)


def test_secrets_come_from_files_beside_the_configuration_and_here(
    write: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(BASE, "folder/gym.yaml")
    monkeypatch.setenv("POLICY_API_KEY", "of-the-environment")
    assert judge(gym([file])).api_key == "of-the-environment"
    write("policy_api_key: beside-the-file\nother: [kept-as-well]\npolicy_model_name: large", "folder/env.yaml")
    made = gym([file])
    assert (judge(made).api_key, judge(made).name) == ("beside-the-file", "large")  # it wins over the configuration
    write("policy_api_key: of-this-folder", "env.yaml")
    assert judge(gym([file])).api_key == "of-this-folder"
    assert made.warnings == ()
    for secret in ("of-the-environment", "beside-the-file", "kept-as-well", "of-this-folder"):
        assert redact(f"it is {secret}!") == "it is ***!"
        assert secret not in repr(made)
        assert secret not in repr(made.servers)
    assert redact("large") == "large"


@pytest.mark.parametrize(
    ("argument", "remedy"),
    [
        ("policy_api_key=swordfish", "set the environment variable POLICY_API_KEY"),
        ("++policy_api_key=swordfish", "set the environment variable POLICY_API_KEY"),
        ("token=swordfish", "write ${gym_token} in its place"),
        ("servers.judge.api_key=swordfish", "write ${gym_token} in its place"),
        ("+servers.far={url: http://10.0.0.6, token: swordfish}", "write ${gym_token} in its place"),
        ("+servers.far={url: http://10.0.0.6, token: swordfish, api_key: '${gym_token}'}", "write ${gym_token}"),
    ],
)
def test_a_secret_in_an_argument_is_refused(argument: str, remedy: str, write: Callable[..., str]) -> None:
    for read in (gym, head_of):
        with pytest.raises(ConfigError) as refused:
            read([write(), argument])
        assert "on the command line, which every user of this machine can read; give it in env.yaml" in str(
            refused.value
        )
        assert remedy in str(refused.value)
        assert "swordfish" not in str(refused.value)


def test_how_a_server_is_asked_is_no_secret(write: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLICY_API_KEY", "nothing-much")
    made = gym([write(), "auth=none", "servers.math.auth=token", "+servers.more={environment: exact, auth: none}"])
    assert (made.auth, math(made).auth, made.servers["more"].auth) == ("none", "token", "none")


def test_no_message_holds_a_secret(write: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    file, secret = write(), "swordfish-and-other-things"
    monkeypatch.setenv("POLICY_API_KEY", secret)
    found = told(
        file,
        "servers.math.replicas=${policy_api_key}",
        "servers.judge.model=${policy_api_key}",
        "servers.agent={command: [run, '--key=${policy_api_key}']}",
    )
    assert "swordfish" not in found
    assert "servers.math.replicas: expected int, found a secret" in found
    assert "servers.judge.model: give an address that begins with http:// or https://" in found
    assert told(file, "servers.agent={command: [run, '--key=${policy_api_key}']}") == (
        "gym.yaml: 1 problem\n  servers.agent.command: it holds a secret, which every user of the machine could read "
        "in its command line; give it in servers.agent.env, and let the program read that variable"
    )


def test_a_host_that_others_reach_asks_for_a_token(write: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    file = write("default_host: 0.0.0.0\nservers: {math: {environment: math}, far: {url: 'http://b:1', token: t}}")
    text = told(file)
    for where in ("head_server", "servers.math"):
        assert (
            f"{where}: others reach 0.0.0.0, so clients have to show a token that they know; give token: "
            "'${gym_token}' (GYM_TOKEN in the environment), or auth: none in a network that you trust"
        ) in text
    monkeypatch.setenv("GYM_TOKEN", "we-all-know-it")
    assert gym([file, "token=${gym_token}"]).token == "we-all-know-it"
    assert gym([file, "token=${gym_token}"]).warnings == ()
    assert gym([file, "auth=none"]).warnings == (
        "servers.math listens on 0.0.0.0 with auth: none: whoever reaches it may use it",
        "head_server listens on 0.0.0.0 with auth: none: whoever reaches it may use it",
    )
    assert gym([file, "default_host=localhost", "auth=none"]).warnings == ()
    assert "head_server: others reach 0.0.0.0" in told(file, "servers.math.auth=none")
    assert gym([file, "default_host=node-7", "head_server.host=::1", "servers.math.auth=none"]).warnings != ()


def test_what_nemo_gyms_agents_ask_is_open(write: Callable[..., str]) -> None:
    file = write("servers: {math: {environment: math, protocol: nemo_gym}}")
    assert told(file) == (
        "gym.yaml: 1 problem\n  servers.math.protocol: NeMo Gym's agents send no token, so it has to be open; give "
        "servers.math.auth: none"
    )
    assert gym([file, "servers.math.auth=none"]).servers["math"].protocol == "nemo_gym"
    assert "servers.math.protocol" in told(file, "servers.math.protocol=nemo")


def test_a_client_needs_no_secret_of_servers(write: Callable[..., str]) -> None:
    file = write()
    assert head_of([file, "head_server.port=7000"]).head_server.port == 7000
    assert "there is no policy_api_key" in told(file)
    with pytest.raises(ConfigError, match="gym.yaml\n  head_server.port: give a port from 1 to 65535"):
        head_of([file, "head_server.port=70000"])


def test_an_executable_may_be_described(write: Callable[..., str]) -> None:
    file = write("servers: {math: {environment: math, executable: {name: judge, requirements: [cowsay==6.1]}}}")
    assert executable_of(gym([file]).servers["math"]).requirements == ("cowsay==6.1",)
    assert "servers.math.executable: executable: there is none named 'gm'; did you mean 'gym'?" in told(
        file, "servers.math.executable=gm"
    )
    assert "servers.math.executable: Executable: it has no argument 'extra'; use extras; it takes name, extras" in told(
        file, "servers.math.executable={name: x, extra: y}"
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "servers: there are none; give at least one, as in servers: {math: {environment: math}}"),
        (("servers={}",), "servers: there are none"),
        (("servers=3",), "servers: there are none"),
        (("servers={a b: {environment: math}}",), "servers.a b: a name has letters, digits and . _ -"),
        (("servers={a: math}",), "servers.a: expected a mapping, as in {environment: math}"),
        (("servers={a: {}}",), "servers.a: a server has one of environment, model, command, url; this one has none"),
        (("servers={a: {comand: []}}",), "this one has none of them; did you mean command?"),
        (
            ("servers={guess: {environment: exact}}", "servers.gues.replicas=2"),
            "command, url; this one has none of them; did you mean servers.guess?",
        ),
        (("servers={a: {url: x, model: y}}",), "this one has model and url"),
        (("servers={a: {url: x}}",), "servers.a.url: give an address that begins with http:// or https://"),
        (("servers={a: {url: ['http://b', c]}}",), "servers.a.url: give an address that begins with http:// or"),
        (("servers={a: {url: []}}",), "servers.a.url: give an address that begins with http:// or https://"),
        (
            ("servers={a: {environment: math, timeout: 3}}",),
            "an option of the environment is servers.a.options.timeout",
        ),
        (("servers={a: {environment: math, replica: 3}}",), "servers.a.replica: no such key; did you mean"),
        (("servers={a: {environment: math, replicas: 0}}",), "servers.a.replicas: give a positive number"),
        (("servers={a: {environment: math, port: 70000}}",), "servers.a.port: give a port from 1 to 65535, or 0"),
        (
            ("servers={a: {environment: math}}", "deadline=0", "grace=-1"),
            "gym.yaml: 2 problems\n  deadline: give a pos",
        ),
        (
            ("servers={a: {environment: math, port: 10999, replicas: 2}}",),
            "servers.a.port: 11000 is that of head_server, too; give another one, or 0",
        ),
        (
            ("servers={a: {environment: math, port: 80}, b: {command: [x], port: 80}}", "head_server.port=0"),
            "servers.b.port: 80 is that of servers.a, too",
        ),
        (
            ("servers={a: {environment: math}}", "default_hst=x"),
            "default_hst: no file has it, and nothing refers to it",
        ),
        (("servers={a: {environment: math}}", "qqq=x"), "nothing refers to it; the keys are servers, default_host"),
        (("--port=3",), "--port=3: options are written key=value, without dashes"),
        (("servers..a=3",), "servers..a: a part of the key is empty; write key=value or key.sub=value"),
        (
            ("nowhere.yaml",),
            "nowhere.yaml: cannot be read: No such file or directory; give an existing file, or key=value",
        ),
        (("+config_paths=nowhere.yaml",), "nowhere.yaml: cannot be read"),
        (("gym.json",), "gym.json: neither key=value nor a file that ends in"),
        (("bad.toml",), "bad.toml: not valid: "),
        (("bad.yaml",), "bad.yaml: not valid YAML, line 1: "),
        (("flow.yaml",), "; within { } and [ ] a reference stands in quotes: {api_key: '${policy_api_key}'}"),
        (("near.yaml",), "default_hosts: nothing refers to it; did you mean default_host?"),
    ],
)
def test_mistakes_are_told(write: Callable[..., str], args: tuple[str, ...], message: str) -> None:
    write("{}", "gym.json")
    write("= 3", "bad.toml")
    write("a: [", "bad.yaml")
    write("a: {b: ${c}}", "flow.yaml")
    write("default_hosts: localhost", "near.yaml")
    assert message in told(write(""), *args)


def test_addresses_of_replicas(write: Callable[..., str]) -> None:
    file = write("hosts: [http://b:1, http://c:1]\nservers: {one: {url: http://a:1}, several: {url: '${hosts}'}}")
    assert [each.urls for each in gym([file]).servers.values()] == [["http://a:1"], ["http://b:1", "http://c:1"]]
    assert gym([file, "servers.one.url=[http://d:1,http://e:1]"]).servers["one"].urls == ["http://d:1", "http://e:1"]


def test_no_configuration() -> None:
    assert told("servers.math.replicas=3") == "no configuration is given; name one: CONFIG.yaml"


def test_an_address_of_ray_that_nothing_uses_is_told(tmp_path: Path) -> None:
    (tmp_path / "gym.yaml").write_text("ray_head_node_address: auto\nservers: {math: {environment: math}}")
    (warning,) = gym([str(tmp_path / "gym.yaml")]).warnings
    assert warning.startswith("ray_head_node_address: no server has workers, so nothing runs on that cluster")
    assert gym([str(tmp_path / "gym.yaml"), "servers.math.workers=2"]).warnings == ()
