# mypy: ignore-errors
"""A taskset for a Python that has verifiers 0.4, and the server of it: sums, and a tool.

python -m verifiers_0_4 PORT WORKERS
"""

import sys

import verifiers.v1 as vf


class Sum(vf.TaskData):
    answer: str


class Calculator(vf.Toolset[vf.SharedToolsetConfig]):
    @vf.tool
    async def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b


class Add(vf.Task[Sum]):
    @vf.reward(weight=1.0)
    async def right(self, trace) -> float:
        if "raise" in (trace.last_reply or ""):
            raise RuntimeError("oh")
        return float(self.data.answer in (trace.last_reply or ""))

    @vf.reward(weight=0.5)
    async def short(self, trace) -> float:
        return 1 / (1 + len(trace.last_reply or ""))

    @vf.metric
    async def letters(self, trace) -> float:
        return float(len(trace.last_reply or ""))


class Sums(vf.Taskset[Add, vf.TasksetConfig]):
    def load(self):
        return [Add(Sum(prompt=f"{a}+{a}=", answer=str(2 * a)), self.config.task) for a in range(1, 4)]

    @classmethod
    def toolsets(cls, config):
        return [Calculator(vf.SharedToolsetConfig())]


__all__ = ["Sums"]

if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].isdigit():
        from verifiers.v1.serve import serve_env

        agent = {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}}
        serve_env(
            max_workers=int(sys.argv[2]),
            address=f"tcp://127.0.0.1:{sys.argv[1]}",
            config_data={"taskset": {"id": "verifiers_0_4"}, "agent": agent},
        )
    else:
        Calculator.run()
