"""Somebody else's agent: `python examples/agent.py` trains the model behind an agent of openai-agents, unmodified."""

import json
import random
from functools import partial
from typing import Any, Literal

import attrs
from attrs.validators import ge

import nrl
from nrl import Layout, config, data, tiny
from nrl.algos import advantages, grpo_loss, sft_loss
from nrl.backends import SAMPLERS, TRAINERS, Optimizer, Sampling, Trainer, TrainState, adamw
from nrl.envs import Task, Trace, Verdict, number
from nrl.envs.tools import tool
from nrl.gym.endpoint import Endpoint

AGENTS = nrl.Executable("agents", requirements=["openai-agents>=0.24,<0.25"], package="agents")
TOLD, says = "Use the calculator.", partial(dict[str, Any], role="assistant")


def add(a: float, b: float) -> str:
    """Add two numbers."""
    return f"{a + b:.15g}"


SCHEMA = tool(add).schema


async def agent(task: Task, endpoint: Endpoint) -> Verdict:  # called in a process that has the package
    import agents as of  # type: ignore[import-not-found]

    async def compute(_: Any, arguments: str) -> str:
        return add(**json.loads(arguments))

    about, quiet = SCHEMA["function"], of.RunConfig(tracing_disabled=True)
    known = of.FunctionTool(about["name"], about["description"], about["parameters"], compute, strict_json_schema=False)
    async with of.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        helper = of.Agent("it", instructions=TOLD, tools=[known], model=of.OpenAIResponsesModel(endpoint.model, client))
        try:
            said = await of.Runner.run(helper, task["prompt"], max_turns=3, run_config=quiet)
        except of.AgentsException:  # what the model did wrong: a tool that there is not, or no answer in three turns
            return 0.0
    return number(task, Trace(task["prompt"], [str(said.final_output)]))


env = nrl.pooled(nrl.driven(agent), workers=2, executable=AGENTS)  # `nrl eval env=examples/agent.py:env`, too


def sums(seed: int, *, lessons: bool = False) -> list[Task]:  # a quarter of the lessons calls the calculator
    draw, rows = random.Random(seed), list[Task]()
    for at in range(4096):
        a, b, guess = draw.randint(100, 999), draw.randint(100, 999), says(content=str(draw.randint(200, 1998)))
        call = says(content="", tool_calls=[{"function": {"name": "add", "arguments": {"a": a, "b": b}}}])
        right = [call, {"role": "tool", "content": str(a + b)}, says(content=str(a + b))]
        asked = [{"role": "system", "content": TOLD}, {"role": "user", "content": f"{a}+{b}="}]
        lesson = {"prompt": asked, "response": [guess] if at % 4 else right, "tools": [SCHEMA]}
        rows.append(lesson if lessons else {"prompt": f"{a}+{b}=", "answer": a + b})
    return rows


@attrs.frozen
class Config:
    model: str | None = None  # a folder or a hub name; none: the tiny model
    trust_remote_code: bool = False  # true: Python files that lie with the model may run
    data: str | None = None  # a file or a dataset with "prompt" and "answer"; none: sums
    steps: int = 40
    seed: int = 0
    out: str | None = None  # none: a new folder under runs/; that of an earlier run: go on with it
    checkpoints: nrl.Checkpoints = nrl.Checkpoints()
    cluster: str = "local"  # "local": this process; "ray", or the address of a Ray cluster: actors
    trainer: Literal["fsdp", "megatron"] = "fsdp"  # of nrl.backends.TRAINERS
    sampler: Literal["hf", "vllm", "vllm-cpu"] = "hf"  # vLLM: on a GPU, or a CPU
    dp: int = attrs.field(default=1, validator=ge(1))  # shards that the trainer splits a batch into
    layout: Layout = config.derived(lambda cfg: Layout(cfg.dp))  # all axes of the trainer's mesh; dp is the short form
    samplers: int = attrs.field(default=1, validator=ge(0))  # processes that sample; 0: on the trainer's slots
    prompts: int = attrs.field(default=16, validator=ge(1))  # a step
    group_size: int = attrs.field(default=8, validator=ge(1))  # episodes a prompt
    optimizer: Optimizer = config.derived(lambda cfg: adamw(lr=1e-6 if cfg.model else 5e-4, betas=(0.9, 0.95)))
    sampling: Sampling = config.derived(lambda cfg: Sampling(max_new_tokens=512 if cfg.model else 48))  # of a turn
    warmup: int = config.derived(lambda cfg: 0 if cfg.model else 160, validator=ge(0))  # supervised, of the tiny model


def main(cfg: Config) -> None:
    """GRPO, over conversations that an agent leads."""
    with nrl.run(cfg) as run, nrl.cluster(cfg.cluster) as cluster:
        tasks = data.tasks(cfg.data or sums(cfg.seed), seed=cfg.seed, chat=False)
        slots, make = cluster.reserve(cfg.layout.slots + cfg.samplers, least=cfg.layout.slots), TRAINERS[cfg.trainer]
        words = tiny.bpe([json.dumps(SCHEMA), TOLD, tiny.CHATML])
        model = tiny.model_or(cfg.model, tokenizer=words, trust_remote_code=cfg.trust_remote_code)
        trainer = make(slots[: cfg.layout.slots], model, cfg.optimizer, layout=cfg.layout)
        sampler = SAMPLERS[cfg.sampler](slots[cfg.layout.slots :] or slots, model, cfg.sampling)
        groups, step = nrl.rollouts(sampler, env, tasks, n=cfg.group_size, seed=cfg.seed), trainer.train_step(grpo_loss)
        policy: Trainer | TrainState = trainer
        if cfg.warmup:
            collate, warm = partial(data.supervised, tokenizer=words), make(trainer.mesh, model, adamw(lr=2e-3))
            taught = nrl.batched(data.tasks(sums(cfg.seed + 1, lessons=True)), 64, collate=collate)
            policy = trainer.init(nrl.fit(run, "warmup", warm, sft_loss, taught, cfg.warmup).params)
        state, stream = run.restore(policy=policy, stream=nrl.batched(groups, cfg.prompts))
        nrl.publish(state.params, sampler)
        for i, batch in run.steps(stream):
            batch = nrl.assign(advantages(batch), old_logprobs=batch["rollout_logprobs"])
            state, metrics = step(state, batch)
            nrl.publish(state.params, sampler)
            run.log(i, metrics, nrl.summary(batch), samples=nrl.samples(batch, sampler.tokenizer))
            run.save(i, policy=state, stream=stream)
        trainer.export(state.params, run.out / "model")


if __name__ == "__main__":
    nrl.launch(nrl.retrying(main), Config)
