"""TRL's side of `vs_trl.py`: a GRPOTrainer that takes a step when told to, in TRL's own environment.

It wraps the trainer's methods to time them, and changes nothing in what they do.
"""

import json
import resource
import sys
from pathlib import Path
from typing import Any

from benchmarks._paired import Clock, replies

__all__ = ["main", "reward", "time_torch"]


def reward(text: str) -> float:
    """The share of vowels: never the same for a whole group, so that every row has a gradient.

    >>> reward("ab"), reward("")
    (0.5, 0.0)
    """
    return sum(letter in "aeiouAEIOU13579" for letter in text) / max(1, len(text))


def time_torch(clock: Clock) -> None:
    """Time what both sides do through torch: backward passes and the optimizer."""
    import torch

    autograd: Any = torch.autograd
    autograd.backward = clock.wrap("backward", autograd.backward)
    torch.optim.AdamW.step = clock.wrap("optimizer", torch.optim.AdamW.step)  # type: ignore[method-assign]


def main() -> None:
    """Be the worker; the only argument is a JSON object of settings."""
    cfg = json.loads(sys.argv[1])
    answer = replies()
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

    torch.set_num_threads(cfg["threads"])
    clock, forwards = Clock(), [0]
    lengths: list[int] = []
    rows = cfg["prompts"] * cfg["group"]
    args = GRPOConfig(
        output_dir=str(Path(cfg["folder"]) / "trl"),
        use_cpu=True,
        bf16=False,
        max_steps=1_000_000,
        per_device_train_batch_size=rows // cfg["passes"],
        gradient_accumulation_steps=cfg["passes"],
        num_generations=cfg["group"],
        max_completion_length=cfg["new_tokens"],
        cache_implementation=cfg["trl_cache"],
        beta=0.0,
        loss_type="grpo",
        learning_rate=cfg["lr"],
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        shuffle_dataset=False,
        seed=cfg["seed"],
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        model_init_kwargs={"dtype": "float32"},
    )

    def score(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths.extend(map(len, completion_ids))
        return [reward(text) for text in completions]

    class Turns(TrainerCallback):
        last: Any = None

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            answer(self.last)
            forwards[0] = 0
            lengths.clear()
            clock.take()
            self.whole = clock("total")
            self.whole.__enter__()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.whole.__exit__(None, None, None)
            times = clock.take()
            for kind in ("wall", "cpu"):
                parts = ("rollout", "forward", "backward", "optimizer")
                times[f"{kind}/other"] = times[f"{kind}/total"] - sum(times[f"{kind}/{part}"] for part in parts)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            self.last = {"times": times, "lengths": list(lengths), "forwards": forwards[0], "peak_mib": peak}

    data = Dataset.from_list([json.loads(line) for line in Path(cfg["data"]).read_text().splitlines()])
    trainer = GRPOTrainer(
        model=cfg["folder"],
        processing_class=AutoTokenizer.from_pretrained(cfg["folder"], padding_side="left"),
        reward_funcs=score,
        args=args,
        train_dataset=data,
        callbacks=[Turns()],
    )

    def counted(*args: Any, **kwargs: Any) -> Any:
        forwards[0] += 1
        return logprobs(*args, **kwargs)

    logprobs = trainer._get_per_token_logps_and_entropies
    trainer._get_per_token_logps_and_entropies = counted
    trainer._generate_single_turn = clock.wrap("generate", trainer._generate_single_turn)
    trainer._generate_and_score_completions = clock.wrap("rollout", trainer._generate_and_score_completions)
    trainer._compute_loss = clock.wrap("forward", trainer._compute_loss)
    time_torch(clock)
    trainer.train()


if __name__ == "__main__":
    main()
