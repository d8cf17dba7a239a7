"""A model whose chat template opens its reasoning learns to answer: reinforcement pays for the answer alone."""

from typing import Any

import nrl
from nrl import data, tiny
from nrl.algos import advantages, grpo_loss
from nrl.backends import adamw, fsdp, hf
from nrl.batch import Batch
from nrl.batch.metrics import finalize
from nrl.envs import Trace, single_turn

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<think>{% endif %}"


def thinking_tokenizer() -> Any:
    """A tokenizer with ten digits and the marks of reasoning, whose template opens it."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    words = [*special.values(), "<think>", "</think>", *"0123456789"]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"</?think>|[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, chat_template=TEMPLATE, clean_up_tokenization_spaces=False, **special
    )


def has_digit(task: Any, trace: Trace) -> float:
    return float(any(map(str.isdigit, trace.answer)))


def test_reasoning_earns_nothing_and_the_model_learns_to_answer() -> None:
    tokenizer, seen = thinking_tokenizer(), list[Batch]()
    with nrl.cluster("local") as cluster:
        slots, model = cluster.reserve(2), tiny.model(tokenizer=tokenizer)
        trainer = fsdp.trainer(slots[:1], model, adamw(lr=2e-3))
        sampler = hf.sampler(slots[1:], model, nrl.Sampling(max_new_tokens=8))
        tasks = data.tasks([{"prompt": [{"role": "user", "content": "1"}]}])
        groups = nrl.batched(nrl.rollouts(sampler, single_turn(has_digit), tasks, n=32, seed=0), 2)
        step, state = trainer.train_step(grpo_loss), trainer.init()
        nrl.publish(state.params, sampler)
        for _ in range(10):
            (batch,) = groups.take(1)
            seen.append(batch)
            batch = nrl.assign(advantages(batch), old_logprobs=batch["rollout_logprobs"])
            state, _ = step(state, batch)
            nrl.publish(state.params, sampler)
    for batch in seen:
        for ids, mask, reward, ended in zip(
            batch["input_ids"], batch["loss_mask"], batch["rewards"], batch["reasoning_ended"], strict=True
        ):
            _, closed, answer = tokenizer.decode(ids[mask]).partition("</think>")  # the prompt opened the reasoning
            while "<think>" in answer:
                _, closed, answer = answer.partition("<think>")[2].partition("</think>")
            assert bool(ended) == bool(closed)
            assert reward == float(bool(ended) and any(map(str.isdigit, answer)))
    first, last = (finalize(nrl.summary(batch)) for batch in (seen[0], seen[-1]))
    assert first["unfinished_reasoning"] > 0.3
    assert first["reward"] < 0.5
    assert last["reward"] > 0.8
