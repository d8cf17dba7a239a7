"""What `import nrl` imports, and that the compiler still knows of tensordict what it has to."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json
import sys

{first}
import nrl

before = sorted({{"torch._dynamo", "sympy", "transformers", "ray", "pandas", "matplotlib"}} & sys.modules.keys())
import torch
from tensordict import TensorDict, utils

double = torch.compile(torch.vmap(lambda row: row["x"] * 2), backend="eager", fullgraph=True)
found = double(TensorDict({{"x": torch.arange(3)}}, batch_size=[3])).tolist()

from torch._dynamo import trace_rules

kind = trace_rules.lookup_callable(utils._add_batch_dim_c).__name__
marked = utils._lock_warn._dynamo_marked_constant
hooks = [type(finder).__module__ for finder in sys.meta_path].count("nrl.imports")
print(json.dumps([before, found, kind, marked, hooks, torch.compiler.allow_in_graph.__module__]))
"""


@pytest.mark.parametrize(
    ("first", "imported"), [("", []), ("import torch._dynamo", ["sympy", "torch._dynamo"]), ("import tensordict", None)]
)
def test_the_compiler_is_imported_when_it_is_needed(first: str, imported: list[str] | None) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(first=first)], capture_output=True, text=True, check=True
    )
    before, *rest = json.loads(run.stdout)
    assert before == (["sympy", "torch._dynamo"] if imported is None else imported)
    assert rest == [[0, 2, 4], "TorchInGraphFunctionVariable", True, 0, "torch.compiler"]
