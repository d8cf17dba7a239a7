"""What a fresh interpreter loads, and through which modules."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

__all__ = ["HEAVY", "TORCH", "loaded_by"]

ROOT = Path(__file__).parents[1]
HEAVY = frozenset(
    {"datasets", "megatron", "mlflow", "peft", "pyarrow", "ray", "tensorboard", "transformers", "vllm", "wandb"}
)
"""What no import of a part of nrl loads."""
TORCH = frozenset({"numpy", "tensordict", "torch"})
"""What no import of a part loads that works without tensors."""

_PROGRAM = """
import json, sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        chain, frame = [name], sys._getframe(1)
        while name in wanted and name not in chains and frame is not None:
            module = frame.f_globals.get("__name__", "?")
            if not module.startswith(("importlib", "_frozen_importlib")) and module != chain[0]:
                chain.insert(0, module)
            frame = frame.f_back
        if len(chain) > 1:
            chains[name] = " -> ".join(chain)

wanted, chains = {names!r}, {{}}
sys.meta_path.insert(0, Watch())
{statement}
print(json.dumps({{name: chains.get(name, name) for name in sorted(wanted & set(sys.modules))}}))
"""


def loaded_by(statement: str, names: Iterable[str] = HEAVY, *, path: Path | None = None) -> dict[str, str]:
    """Which of these packages a fresh interpreter has loaded after the statement, each with the chain of modules."""
    program = _PROGRAM.format(names=set(names), statement=statement)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(str(p) for p in (path, ROOT) if p)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, timeout=240)
    assert done.returncode == 0, f"{statement!r} fails:\n{done.stderr}"
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found
