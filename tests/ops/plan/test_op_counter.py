"""What is counted as a wait, a copy and a product, in a process of its own, which fake CUDA tensors change for good."""

import json
import subprocess
import sys

import pytest

SAID = """
import json
import torch
from nrl.ops.plan import fake_cuda
from nrl.ops.plan.op_counter import OpCounter

counting = OpCounter()
fake_cuda.install((9, 0), 80 * 10**9, counting.count_wait)
with counting:
    there = torch.empty(4, 4, device="cuda")
    pinned, pageable = torch.empty(4, 4, pin_memory=True), torch.empty(4, 4)
    counting.forget()
    pinned[:2].to("cuda", non_blocking=True)
    there.copy_(pinned, non_blocking=True)
    there.to("cpu", non_blocking=True)  # torch pins what it makes for it
    pinned.copy_(there, non_blocking=True)
    asynchronous = [kind for (kind, _), count in counting.waits.items() for _ in range(count)]
    counting.forget()
    for act in (
        lambda: pinned.to("cuda"), lambda: pageable.to("cuda", non_blocking=True),
        lambda: there.copy_(pinned), lambda: there.copy_(pageable, non_blocking=True),
        lambda: there.to("cpu"), lambda: pinned.copy_(there), lambda: pageable.copy_(there, non_blocking=True),
    ):
        act()
    blocking = [kind for (kind, _), count in counting.waits.items() for _ in range(count)]
    before = counting.now
    early = torch.empty(100, device="cuda")
    counting.forget()
    large = torch.empty(1000, device="cuda")
    del large
    late = torch.empty(10, device="cuda")
    born = counting.bytes_by_birth([early, early[:5], late])
    then = [counting.peak - before, sum(born.values()), counting.bytes_at_peak(born)]
    counting.forget()
    torch.mv(there, there[0])
    torch.addmv(there[0], there, there[0])
    torch.mm(there, there)
    torch.einsum("ij,jk->ik", there, there)
    print(json.dumps([then, asynchronous, blocking, counting.flops, sum(counting.products.values())]))
"""


@pytest.mark.timeout(120)
def test_copies_that_wait_and_products_of_vectors() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SAID], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    then, asynchronous, blocking, flops, float32 = json.loads(done.stdout.splitlines()[-1])
    assert then == [4 * 1100, 4 * 110, 4 * 100]  # what was made after the peak was not there
    # From and to pinned memory the host goes on; a copy of pageable memory waits, whatever it is asked
    assert asynchronous == ["copy to the device"] * 2 + ["copy to the host"] * 2
    assert blocking == ["copy to the device, blocking"] * 4 + ["copy to the host, blocking"] * 3
    assert flops == {"float32": 2 * 16 + 2 * 16 + 2 * 64 + 2 * 64}
    assert float32 == flops["float32"]
