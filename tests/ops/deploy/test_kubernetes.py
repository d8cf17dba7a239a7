"""`nrl deploy kubernetes`: manifests, by the operator's schemas and Kubernetes' own; their scripts, run by bash."""

import gzip
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import jsonschema  # type: ignore[import-untyped]
import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from nrl import config
from nrl.cli.cli import main
from nrl.errors import ConfigError
from nrl.ops.deploy.kubernetes import Kubernetes, make_manifests
from tests.ops.deploy.test_programs import HOSTILE
from tests.processes import settled

KUBERNETES = "1.33"
GPU = ["gpus=8", "workers=2"]


def strict(schema: Any) -> Any:
    """The schema of a CRD, where an object has the fields that are listed and no others, as `kubectl` has it."""
    if not isinstance(schema, Mapping):
        return schema
    new = {key: value for key, value in schema.items() if key not in ("properties", "items", "additionalProperties")}
    if schema.get("x-kubernetes-int-or-string"):
        new["type"] = ["integer", "string"]
        new.pop("anyOf", None)
    if "properties" in schema:
        new["properties"] = {key: strict(value) for key, value in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            new["additionalProperties"] = False
    return new | {key: strict(schema[key]) for key in ("items", "additionalProperties") if key in schema}


def validator(kind: str) -> Any:
    schema = strict(json.loads(gzip.decompress((Path(__file__).parent / "kuberay" / f"{kind}.json.gz").read_bytes())))
    schema["properties"]["metadata"] = {"type": "object"}  # Kubernetes' own, which the CRD leaves to it
    return jsonschema.Draft202012Validator(schema)


SCHEMAS = {"RayJob": validator("rayjobs"), "RayCluster": validator("rayclusters")}


def wrong(manifest: Any) -> list[str]:
    """What the operator's schema, or Kubernetes' for the objects in it, has against a manifest."""
    if manifest["kind"] not in SCHEMAS:
        return of_kubernetes(manifest)
    found = [
        f"{'.'.join(map(str, each.absolute_path))}: {each.message}"
        for each in SCHEMAS[manifest["kind"]].iter_errors(manifest)
    ]
    spec = manifest["spec"].get("rayClusterSpec", manifest["spec"])
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        template = group["template"]
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"} | template.get("metadata", {})}
        found += of_kubernetes(pod | {"spec": template["spec"]})
    return found


def of_kubernetes(manifest: Any) -> list[str]:
    try:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [error.message]
    return []


def written(*settings: str) -> dict[str, Any]:
    given = ["program=examples/grpo.py", "image=registry.example/nrl:1", "check=false", *settings]
    return {
        name: yaml.load(text, yaml.CSafeLoader) for name, text in make_manifests(config.load(Kubernetes, given)).items()
    }


def pods(found: Mapping[str, Any]) -> tuple[Any, Any]:
    spec = found["rayjob.yaml"]["spec"]["rayClusterSpec"]
    return spec["headGroupSpec"]["template"]["spec"], spec["workerGroupSpecs"][0]["template"]["spec"]


def values(found: Any) -> list[Any]:
    """All that stands in a manifest, keys too."""
    if isinstance(found, dict):
        return [each for key, value in found.items() for each in (key, *values(value))]
    return [each for value in found for each in values(value)] if isinstance(found, list) else [found]


OPTIONS: dict[str, tuple[Sequence[str], str, object]] = {
    "image": (["image=r/other@sha256:ab"], "rayjob.yaml", "r/other@sha256:ab"),
    "name": (["name=other"], "rayjob.yaml", "other"),
    "namespace": (["namespace=team"], "rayjob.yaml", "team"),
    "workers": (["workers=4"], "rayjob.yaml", 4),
    "gpus": (["gpus=3"], "rayjob.yaml", "3"),
    "gpu_resource": (["gpus=8", "gpu_resource=amd.com/gpu"], "rayjob.yaml", "amd.com/gpu"),
    "cpus": (["cpus=16"], "rayjob.yaml", "16"),
    "memory": (["memory=100Gi"], "rayjob.yaml", "100Gi"),
    "shared_memory": (["shared_memory=20Gi"], "rayjob.yaml", "20Gi"),
    "head_cpus": (["head_cpus=6"], "rayjob.yaml", "6"),
    "head_memory": (["head_memory=48Gi"], "rayjob.yaml", "48Gi"),
    "more": (["more={rdma/hca: '1'}"], "rayjob.yaml", "rdma/hca"),
    "claim": (["claim=lustre"], "rayjob.yaml", "lustre"),
    "storage": (["storage=1Ti"], "volume.yaml", "1Ti"),
    "storage_class": (["storage=1Ti", "storage_class=nfs"], "volume.yaml", "nfs"),
    "mount": (["mount=/data"], "rayjob.yaml", "/data"),
    "folder": (["folder=/nrl"], "rayjob.yaml", "/nrl"),
    "env": (["env={HF_HOME: /shared/hf}"], "rayjob.yaml", "/shared/hf"),
    "secrets": (["secrets={HF_TOKEN: hub/token}"], "rayjob.yaml", "hub"),
    "image_pull_secrets": (["image_pull_secrets=[pull]"], "rayjob.yaml", "pull"),
    "service_account": (["service_account=trainer"], "rayjob.yaml", "trainer"),
    "priority": (["priority=high"], "rayjob.yaml", "high"),
    "user": (["user=1000"], "rayjob.yaml", 1000),
    "node_selector": (["node_selector={gpu: h100}"], "rayjob.yaml", "h100"),
    "head_node_selector": (["head_node_selector={pool: cpu-pool}"], "rayjob.yaml", "cpu-pool"),
    "tolerations": (["tolerations=[dedicated=training:NoSchedule, spot]"], "rayjob.yaml", "training"),
    "topology": (["topology=topology.kubernetes.io/zone"], "rayjob.yaml", "topology.kubernetes.io/zone"),
    "labels": (["labels={kueue.x-k8s.io/queue-name: q1}"], "rayjob.yaml", "q1"),
    "suspend": (["suspend=true"], "raycluster.yaml", True),
    "grace": (["grace=300"], "rayjob.yaml", 330),
    "retries": (["retries=5"], "rayjob.yaml", 5),
    "deadline": (["deadline=7200"], "rayjob.yaml", 7200),
    "keep": (["keep=60"], "rayjob.yaml", 60),
    "ray_version": (["ray_version=2.99.0"], "rayjob.yaml", "2.99.0"),
}  # fmt: skip
"""For each option: settings, and a value that one file has for them, and otherwise has not."""


def has(found: Any, value: object) -> bool:
    return any(each == value and type(each) is type(value) for each in values(found))


def test_each_option_changes_a_manifest() -> None:
    plain = written()
    for name, (settings, file, value) in OPTIONS.items():
        found = written(*settings)
        assert has(found[file], value), name
        assert not has(plain.get(file, {}), value), name
    elsewhere = {"program", "arguments", "to", "force", "out", "check"}
    assert {each.name for each in attrs.fields(Kubernetes)} == OPTIONS.keys() | elsewhere


@pytest.mark.parametrize("settings", [[], [each for settings, _, _ in OPTIONS.values() for each in settings]])
def test_manifests_are_valid(settings: Sequence[str]) -> None:
    """With no option, and with all of them."""
    assert {file: wrong(each) for file, each in written(*settings).items() if wrong(each)} == {}


def test_an_unknown_field_is_seen_wherever_it_is() -> None:
    """So what the test above finds valid is not valid for want of looking."""
    for path in (("spec", "suspended"), ("spec", "rayClusterSpec", "headGroupSpec", "replica")):
        found = written()["rayjob.yaml"]
        target = found
        for each in path[:-1]:
            target = target[each]
        target[path[-1]] = 1
        assert wrong(found), path
    found = written()
    pods(found)[1]["containers"][0]["resource"] = {}
    assert wrong(found["rayjob.yaml"])
    found["scripts.yaml"]["datum"] = {}
    assert wrong(found["scripts.yaml"])


def test_all_pods_mount_the_volume_and_the_head_has_no_gpu() -> None:
    found = written(*GPU, "tolerations=[dedicated=training:NoSchedule, spot]", "topology=rack", "storage=1Ti")
    head, worker = pods(found)
    for pod in (head, worker):
        names = {each["name"]: each["mountPath"] for each in pod["containers"][0]["volumeMounts"]}
        assert names == {"shared": "/shared", "scripts": "/etc/nrl", "shm": "/dev/shm"}
        assert pod["volumes"][0] == {"name": "shared", "persistentVolumeClaim": {"claimName": "grpo-shared"}}
    spec = found["rayjob.yaml"]["spec"]["rayClusterSpec"]
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert "nvidia.com/gpu" not in head["containers"][0]["resources"]["limits"]
    assert worker["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert worker["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "dedicated", "operator": "Equal", "value": "training", "effect": "NoSchedule"},
        {"key": "spot", "operator": "Exists"},
    ]
    (term,) = worker["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    labels = spec["workerGroupSpecs"][0]["template"]["metadata"]["labels"]
    assert term == {"topologyKey": "rack", "labelSelector": {"matchLabels": labels}}
    assert found["volume.yaml"]["spec"]["accessModes"] == ["ReadWriteMany"]
    assert found["raycluster.yaml"]["spec"] == spec | {"suspend": False}


def test_a_secret_is_a_reference() -> None:
    (head, worker) = pods(written("secrets={HF_TOKEN: hub/token}"))
    expected = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
    assert expected in head["containers"][0]["env"]
    assert expected in worker["containers"][0]["env"]


def test_values_are_quoted_for_yaml() -> None:
    found = written(
        f"env={json.dumps({'A': HOSTILE[0]}, ensure_ascii=False)}", "env.B=yes", "env.C='1'", "labels={a: 'on'}"
    )
    for pod in pods(found):
        env = {each["name"]: each["value"] for each in pod["containers"][0]["env"] if "value" in each}
        assert {key: env[key] for key in "ABC"} == {"A": HOSTILE[0], "B": "yes", "C": "'1'"}
    assert found["rayjob.yaml"]["metadata"]["labels"] == {"a": "on"}


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    """What a ConfigMap holds, as files; the volume is a folder here, and so is the one in the image."""
    (tmp_path / "train.py").write_text(
        "import json, signal, sys, time, os\n"
        "def stop(*_):\n    time.sleep(1); print('saved', flush=True); os._exit(143)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "print(json.dumps(sys.argv[1:]), flush=True)\n"
        "time.sleep(60 * ('wait' in sys.argv)); sys.exit(7)\n"
    )
    words = json.dumps([*HOSTILE, "wait"], ensure_ascii=False)
    given = [f"mount={tmp_path}/a b", f"folder={tmp_path}", "program=train.py", f"arguments={words}"]
    for name, text in written(*given)["scripts.yaml"]["data"].items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_shellcheck_finds_nothing_in_the_scripts(scripts: Path) -> None:
    files = [str(scripts / each) for each in ("start.sh", "stop.sh", "wait.sh")]
    assert subprocess.run(["shellcheck", *files], capture_output=True, text=True).stdout == ""


def test_pods_that_end_wait_until_the_program_has_saved(scripts: Path) -> None:
    """The head's script tells it, and the workers' waits; nobody waits where no program runs."""
    given = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "TMPDIR": str(scripts)}

    def bash(name: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(["bash", str(scripts / name)], env=given, stdout=subprocess.PIPE, text=True)

    with bash("stop.sh") as stop, bash("wait.sh") as wait:
        assert (stop.wait(5), wait.wait(5)) == (0, 0)
    with bash("start.sh") as start:
        assert start.stdout is not None
        assert json.loads(start.stdout.readline()) == [
            *HOSTILE,
            "wait",
            "checkpoints.grace=120",
            "cluster=auto",
            f"out={scripts}/a b/runs/train",
        ]
        assert not settled(lambda: not (scripts / "nrl-program").exists(), 5)
        with bash("wait.sh") as wait, bash("stop.sh") as stop:
            assert stop.wait(20) == 0
            assert start.stdout.readline() == "saved\n"
            assert wait.wait(5) == 0
        assert start.wait(5) == 143
    assert list((scripts / "a b/runs").iterdir()) == []


def test_a_program_saves_while_a_worker_that_is_evicted_waits(scripts: Path) -> None:
    """Its pod alone is told to end; one of another cluster tells nobody, and waits for nobody."""
    given = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "TMPDIR": str(scripts)}

    def bash(name: str, cluster: str) -> "subprocess.Popen[str]":
        env = given | {"NRL_CLUSTER": cluster}
        pipe = subprocess.PIPE
        return subprocess.Popen(["bash", str(scripts / name)], env=env, stdout=pipe, stderr=pipe, text=True)

    runs = scripts / "a b/runs"
    runs.mkdir(parents=True)
    (runs / "train.leaving").write_text("second\n")  # of a start that was killed
    with bash("start.sh", "second") as start:
        assert start.stdout is not None
        assert start.stderr is not None
        start.stdout.readline()
        with bash("wait.sh", "first") as wait:
            assert wait.wait(5) == 0
        assert not (runs / "train.leaving").exists()
        (runs / "train.leaving").write_text("first\n")
        time.sleep(1.5)
        assert start.poll() is None
        with bash("wait.sh", "second") as wait:
            assert start.stdout.readline() == "saved\n"
            assert start.wait(5) == 143
            assert wait.wait(5) == 0
        assert start.stderr.read() == "job: the pod of a worker ends; the program is told to save and to end\n"
    assert list(runs.iterdir()) == []
    for pod in pods(written()):
        (of_pod,) = [each for each in pod["containers"][0]["env"] if each["name"] == "NRL_CLUSTER"]
        assert of_pod["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.labels['ray.io/cluster']"


def test_a_job_that_is_stopped_saves(scripts: Path) -> None:
    """`ray job stop` sends SIGTERM to the script and the program alike; another end is the program's own status."""
    given = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "TMPDIR": str(scripts)}
    words = ["setsid", "bash", str(scripts / "start.sh")]
    with subprocess.Popen(words, env=given, stdout=subprocess.PIPE, text=True) as start:
        assert start.stdout is not None
        start.stdout.readline()
        os.killpg(start.pid, signal.SIGTERM)
        assert start.stdout.readline() == "saved\n"
        assert start.wait(5) == 143
    path = scripts / "start.sh"
    path.write_text(path.read_text().replace(" wait checkpoints", " checkpoints"))
    assert subprocess.run(["bash", str(path)], env=given, stdout=subprocess.PIPE).returncode == 7


REFUSED = {
    "workers=0": "'workers' must be >= 1: 0",
    "name=Train_1": "expected a name of at most 47 small letters, digits and -, a letter first, found 'Train_1'",
    f"name={'a' * 48}": "expected a name of at most 47 small letters",
    "image=Nrl:1": "expected the name of an image, such as registry.example/team/nrl:1, found 'Nrl:1'",
    "memory=64GB": "expected a quantity such as 64Gi, found '64GB'",
    "cpus=0": "expected a number of cores such as 8 or 500m, found '0'",
    "claim=a/b": "expected a name of small letters, digits, - and ., found 'a/b'",
    "mount=shared": "expected an absolute path, found 'shared'",
    "secrets={HF_TOKEN: hf_abc}": "expected SECRET/KEY, the name of a Secret and of a key in it, found 'hf_abc'",
    "env={A-B: x}": "expected names of environment variables, found 'A-B'",
    "tolerations=[a:Never]": "expected tolerations such as dedicated=training:NoSchedule, found 'a:Never'",
    "node_selector={a b: c}": "expected a label, such as topology.kubernetes.io/zone, found 'a b'",
    "node_selector={a: b c}": "expected values of labels, found 'b c'",
    "ray_version=new": "expected numbers, found 'new'",
    "out=/tmp/run": "out=/tmp/run is not in mount=/shared, the volume of all pods; give a folder there",
    "out=/shared": "deploy kubernetes: out=/shared is not in mount=/shared",
    "storage_class=nfs": "found storage_class=nfs without storage=, the size of a new volume",
    "env={API_TOKEN: abc}": "API_TOKEN looks like a secret, which a file must not hold; give secrets.VARIABLE=",
    "env={RAY_JOB_STOP_WAIT_TIME_S: '3'}": "found RAY_JOB_STOP_WAIT_TIME_S among the variables, which the files set "
    "themselves; give grace= instead",
    "secrets={RAY_AUTH_TOKEN: ray/token}": "found RAY_AUTH_TOKEN among the variables, which the files set themselves; ",
    "arguments=[cluster=local]": "deploy kubernetes: found cluster=local after `--`; the program joins the cluster",
    "folder=/a\x01b": "deploy kubernetes: folder has a character that cannot be printed; found",
}


@pytest.mark.parametrize("setting", REFUSED)
def test_what_kubernetes_would_refuse_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(REFUSED[setting])):
        written(setting)


def test_no_variable_of_a_pod_can_be_given_twice() -> None:
    found = written()
    names = [each["name"] for pod in pods(found) for each in pod["containers"][0]["env"]]
    for name in {*names, *re.findall(r"^([A-Z]\w+)=", found["scripts.yaml"]["data"]["start.sh"], re.MULTILINE)}:
        with pytest.raises(ConfigError, match=f"found {name} among the variables"):
            written(f"env={{{name}: x}}")
    with pytest.raises(ConfigError, match="found A in env= and in secrets=; leave it in one of them"):
        written("env.A=x", "secrets.A=b/c")


CONFIG = """
import attrs, nrl
from nrl.run.checkpoint import Checkpoints

@attrs.frozen
class Config:
    out: str
    cluster: str
    checkpoints: Checkpoints
    steps: int = 3
    layout: nrl.Layout = nrl.Layout()
    samplers: int = 1

if __name__ == "__main__":
    nrl.launch(print, Config)
"""


def test_settings_are_those_of_a_program_that_is_here_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(CONFIG)
    given = ["program=train.py", "check=true"]
    with pytest.raises(ConfigError, match="stepps: no such key; did you mean 'steps'"):
        written(*given, "arguments=[stepps=3]")
    with pytest.raises(ConfigError, match="takes 16 slots, 8 by its layout and 8 for samplers; workers=1 with gpus=8"):
        written(*given, "gpus=8", "arguments=[layout.dp=8, samplers=8]")
    assert written(*given, "gpus=8", "workers=2", "arguments=[layout.dp=8, samplers=8]")
    (tmp_path / "some.yaml").write_text("checkpoints: {grace: 60}\n")
    start = written(*given, "arguments=[some.yaml]")["scripts.yaml"]["data"]["start.sh"]
    assert "train.py some.yaml cluster=auto" in start
    assert "importing train.py, whose Config takes the settings" in capsys.readouterr().err
    (tmp_path / "train.py").unlink()  # it is in the image alone
    assert written(*given, "arguments=[stepps=3]")


def test_it_says_which_claim_has_to_be_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["deploy", "kubernetes", "train.py", "image=i:1", f"to={tmp_path}"]
    for settings, claim in ([], "train-shared"), (["claim=lustre"], "lustre"):
        assert main([*given, *settings, "force=true"]) == 0
        said = (
            f"\nIts pods mount the PersistentVolumeClaim {claim}, which has to be there, and stay Pending without it; "
        )
        assert said in capsys.readouterr().out


def test_it_says_how_the_files_are_applied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["deploy", "kubernetes", "my/Train_2.py", "image=i:1", f"to={tmp_path}/a b", "storage=1Gi"]
    assert main(given) == 0
    files = [shlex.quote(f"{tmp_path}/a b/{each}.yaml") for each in ("scripts", "volume", "rayjob")]
    applied = f"kubectl apply {' '.join(f'-f {each}' for each in files)}"
    assert capsys.readouterr().out == f"4 files are in {tmp_path}/a b; run the program by\n  {applied}\n"
    job = (tmp_path / "a b/rayjob.yaml").read_text()
    assert f"#   {applied}\n" in job
    assert yaml.safe_load(job)["metadata"]["name"] == "train-2"
    assert main([*given, "workers=2"]) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path}/a b/rayjob.yaml and {tmp_path}/a b/raycluster.yaml differs from what would be written" in error
    assert main([*given, "workers=2", "force=true"]) == 0
