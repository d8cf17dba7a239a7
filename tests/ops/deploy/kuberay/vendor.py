"""Makes the schemas beside it: `python vendor.py CLONE_OF_KUBERAY`. They are what the operator's CRDs say of v1."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import yaml

__all__ = ["COMMIT"]

COMMIT = "59d663aeec13760646da3db9c1cf8cfe883e30b7"
"""Of github.com/ray-project/kuberay (Apache License 2.0), the release v1.7.0."""


def _main(clone: str) -> None:
    for kind in ("rayclusters", "rayjobs"):
        path = f"{COMMIT}:ray-operator/config/crd/bases/ray.io_{kind}.yaml"
        text = subprocess.run(["git", "-C", clone, "show", path], check=True, capture_output=True).stdout
        (version,) = [each for each in yaml.load(text, yaml.CSafeLoader)["spec"]["versions"] if each["name"] == "v1"]
        data = json.dumps(version["schema"]["openAPIV3Schema"], sort_keys=True).encode()
        Path(__file__).with_name(f"{kind}.json.gz").write_bytes(gzip.compress(data, mtime=0))


if __name__ == "__main__":
    _main(sys.argv[1])
