"""Episodes that are chats: messages as observations, and tools; what was sampled stays as it was."""

import contextlib
import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

import nrl
from nrl import tiny
from nrl.backends import Completion, Sampling, hf
from nrl.data.templates import templated
from nrl.envs import Environment, Step, Trace, Turn, judged, of_group
from nrl.envs.tools import NewState, State, ToolCall, ToolError, tool, tool_format, tool_use
from nrl.errors import ModelError
from nrl.gym.http.protocol import trace_of, transcript
from nrl.rollout import rollout
from nrl.rollout.bridges import FORKS
from nrl.rollout.conversations import Conversation
from tests.chat_tokenizers import TEMPLATES
from tests.chat_tokenizers import tokenizer as chat_tokenizer
from tests.envs.tool_texts import WRITERS, written


class Chatty:
    """Answers with the next of its texts, whose special tokens are read; each ends with the end of a turn."""

    def __init__(self, template: str, texts: Sequence[str]) -> None:
        self.tokenizer, self.texts, self.asked = chat_tokenizer(template), list(texts), list[list[int]]()
        self.version, self.context_length, self.sampling = 1, 4096, Sampling()

    def generate(self, prompts: Any, *, seeds: Any = None, sampling: Any = None) -> Any:
        self.asked += prompts
        found = [self.texts.pop(0) for _ in prompts]
        ids = [torch.tensor(self.tokenizer.encode(text, add_special_tokens=False)) for text in found]
        return nrl.runtime.done([Completion(x, -torch.ones(len(x)), truncated=False, version=1) for x in ids])

    def receive(self, buckets: Any, version: int, *, inflight: Any = "wait") -> None:
        raise AssertionError("nothing is published")


ASK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
MORE = [{"role": "user", "content": "Hello?"}]
END = {"chatml": "<|im_end|>", "qwen3": "<|im_end|>", "llama3": "<|eot_id|>"}


def two_turns(observation: Any = MORE) -> Environment:
    return Environment(
        lambda task: (0, ASK), lambda state, _: Step(state + 1, done=state == 1, observation=observation)
    )


@pytest.mark.parametrize("template", END)
def test_messages_are_appended_as_the_template_writes_them(template: str) -> None:
    end = END[template]
    sampler = Chatty(template, [f"Hello{end}", f"Bye{end}"])
    batch = rollout(sampler, two_turns(), [{}])
    read = sampler.tokenizer
    whole = [*ASK, {"role": "assistant", "content": "Hello"}, *MORE]
    assert read.decode(sampler.asked[1]) == templated(whole, read, asking=True)
    assert sampler.asked[1][: len(sampler.asked[0])] == sampler.asked[0]
    mask, ids = batch["loss_mask"][0], batch["input_ids"][0]
    assert read.decode(ids[mask].tolist()) == f"Hello{end}Bye{end}"
    assert int(mask.sum()) == int(batch["sampled"][0])


def test_a_turn_that_was_cut_gets_its_end_and_is_not_trained_on_it() -> None:
    sampler = Chatty("chatml", ["Hello", "Bye<|im_end|>"])
    batch = rollout(sampler, two_turns(), [{}])
    ids, mask = batch["input_ids"][0].tolist(), batch["loss_mask"][0].tolist()
    end = sampler.tokenizer.convert_tokens_to_ids("<|im_end|>")
    places = [at for at, token in enumerate(ids) if token == end]
    assert [mask[at] for at in places] == [False, False, False, False, True]
    assert sampler.tokenizer.decode(sampler.asked[1]).endswith(
        "Hello<|im_end|>\n<|im_start|>user\nHello?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_tokens_that_no_tokenizer_would_make_stay() -> None:
    """The letters of a word one by one."""
    sampler = Chatty("chatml", [])
    spelled = [token for letter in "Hello" for token in sampler.tokenizer.encode(letter)]
    end = sampler.tokenizer.encode("<|im_end|>")
    assert spelled != sampler.tokenizer.encode("Hello")
    given = [[*spelled, *end], end]
    sampler.generate = lambda prompts, **_: nrl.runtime.done(  # type: ignore[method-assign]
        [Completion(torch.tensor(x), torch.zeros(len(x)), False, 1) for x in [given.pop(0) for _ in prompts]]
    )
    batch = rollout(sampler, two_turns(), [{}])
    sampled = batch["input_ids"][0][batch["loss_mask"][0]].tolist()
    assert sampled == [*spelled, *end, *end]


HMM, BYE = "<think>\nHmm\n</think>\n\nHello<|im_end|>", "<think>\nHi\n</think>\n\nBye<|im_end|>"


def test_where_the_template_drops_reasoning_the_episode_forks() -> None:
    """Qwen 3 leaves out earlier reasoning when the user speaks: the second row begins without it."""
    sampler = Chatty("qwen3", [HMM, BYE])
    rewarded = judged(two_turns(), lambda task, trace: 2.0)
    batch = rollout(sampler, rewarded, [{}])
    read = sampler.tokenizer
    assert len(batch) == 2
    assert batch["episode_ids"].unique().numel() == 1
    assert batch["group_ids"].tolist() == [0, 0]
    assert batch["rewards"].tolist() == [2.0, 2.0]
    said = [read.decode(row["input_ids"][row["loss_mask"]].tolist()) for row in batch]
    assert said == [HMM, BYE]  # each once
    whole = [*ASK, {"role": "assistant", "content": HMM.removesuffix("<|im_end|>")}, *MORE]
    assert read.decode(sampler.asked[1]) == templated(whole, read, asking=True)
    assert "Hmm" not in read.decode(sampler.asked[1])
    assert batch["sampled"].tolist() == batch["loss_mask"].sum(-1).tolist()
    found = nrl.finalize(nrl.summary(batch))
    assert found["forks"] == 1
    assert found["reward"] == 2.0
    assert found["tokens/sampled"] == found["tokens/trained"] == int(batch["sampled"].sum()) == found["length"]


def test_a_forked_episode_counts_once() -> None:
    """Beside one of the same group that did not fork; the advantages are those of two episodes."""
    sampler = Chatty("qwen3", [HMM, "Hello<|im_end|>", BYE, "Bye<|im_end|>"])

    def verify(task: Any, trace: Trace) -> float:
        return float("Hmm" in trace.turns[0].text)

    batch = rollout(sampler, judged(two_turns(), verify), [{}], n=2)
    assert batch["rewards"].tolist() == [1.0, 1.0, 0.0]
    found = nrl.algos.advantages(batch)["advantages"]
    expected = [0.5 / (0.5**0.5 + 1e-6)] * 2 + [-0.5 / (0.5**0.5 + 1e-6)]  # the mean of two is 0.5
    for row, wanted in zip(range(3), expected, strict=True):
        torch.testing.assert_close(found[row][batch["loss_mask"][row]].unique(), torch.tensor([wanted]))
    assert nrl.finalize(nrl.summary(batch))["reward"] == 0.5


@pytest.mark.parametrize("grouped", [False, True], ids=["each", "group"])
@pytest.mark.parametrize("there", [lambda f: f, partial(nrl.pooled, workers=1)], ids=["here", "pooled"])
def test_a_verifier_sees_all_tokens_of_an_episode_that_forked(grouped: bool, there: Any) -> None:
    """Those of its rows in the batch, one after the other; sent as a record, too."""

    def verify(task: Any, trace: Trace) -> dict[str, float]:
        assert trace_of(transcript(trace)) == trace
        said = [token for turn in trace.turns for token in turn.token_ids]
        pairs = zip(trace.token_ids, trace.sampled, strict=True)
        assert [token for token, own in pairs if own] == said
        return {"tokens": len(trace.token_ids), "sampled": sum(trace.sampled), "turns": len(trace.turns)}

    verifier: Any = of_group(lambda task, traces: [verify(task, trace) for trace in traces]) if grouped else verify
    batch = rollout(Chatty("qwen3", [HMM, BYE]), judged(two_turns(), there(verifier)), [{}])
    assert batch["valid"].tolist() == [True, True]
    assert batch["reward/turns"].tolist() == [2.0, 2.0]
    assert batch["reward/sampled"].tolist() == [float(batch["loss_mask"].sum())] * 2
    assert batch["reward/tokens"].tolist() == [float(batch["attention_mask"].sum())] * 2


def test_the_tokens_of_a_trace_are_those_of_the_rows_of_the_batch() -> None:
    seen: list[Trace] = []

    def verify(task: Any, trace: Trace) -> float:
        seen.append(trace)
        return 1.0

    batch = rollout(Chatty("qwen3", [HMM, BYE]), judged(two_turns(), verify), [{}])
    (trace,) = seen
    assert len(batch) == 2
    assert trace.token_ids == tuple(batch["input_ids"][batch["attention_mask"]].tolist())
    assert trace.sampled == tuple(batch["loss_mask"][batch["attention_mask"]].tolist())


def test_groups_of_a_stream_have_all_their_rows(tmp_path: Any) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1"}\n{"prompt": "2"}\n')
    tasks = nrl.data.tasks(str(tmp_path / "tasks.jsonl"), shuffle=False, chat=False)
    sampler = Chatty("qwen3", [HMM, "Hello<|im_end|>", HMM, HMM, BYE, BYE, BYE, BYE])
    groups = nrl.rollouts(sampler, two_turns(), tasks, n=2).take(2)
    assert [len(group) for group in groups] == [3, 4]
    assert [group["group_ids"].unique().tolist() for group in groups] == [[0], [1]]


def test_a_fork_that_fills_the_context_has_no_row_of_its_own() -> None:
    sampler = Chatty("qwen3", [HMM])
    sampler.context_length = 100
    long = [{"role": "user", "content": "Hello " * 100}]
    batch = rollout(sampler, judged(two_turns(long), lambda task, trace: 2.0), [{}])
    assert len(batch) == 1
    assert batch["truncated"].tolist() == [True]
    assert batch["token_rewards"].sum().item() == 2.0


@pytest.mark.parametrize(
    ("observation", "why"),
    [([{"content": "x"}], "role"), ([{"role": "assistant", "content": "x"}], "ends with the assistant's message")],
)
def test_messages_that_are_none_fail_the_row(observation: Any, why: str) -> None:
    with pytest.warns(UserWarning, match=why):
        rollout(Chatty("chatml", ["Hello<|im_end|>"]), two_turns(observation), [{}])


def test_after_a_text_there_are_no_messages() -> None:
    def step(state: int, turn: Turn) -> Step:
        return Step(state + 1, done=False, observation="more" if state == 0 else MORE)

    sampler = Chatty("chatml", ["Hello<|im_end|>", "Bye<|im_end|>"])
    with pytest.warns(UserWarning, match="the episode is no chat: its prompt or an observation before is text"):
        rollout(sampler, Environment(lambda task: (0, ASK), step), [{}])


# --- an environment that changes what was said

HELLO = {"role": "assistant", "content": "Hello"}
SHORT = [{"role": "user", "content": "They said hello."}]


@pytest.mark.parametrize("there", [lambda f: f, partial(nrl.pooled, workers=1)], ids=["here", "pooled"])
@pytest.mark.parametrize(
    ("messages", "why", "kept"),
    [
        ([*ASK, HELLO, *MORE], None, True),  # word for word
        (SHORT, "rewritten", False),
        ([*ASK, {"role": "assistant", "content": "Hallo"}, *MORE], "rewritten", False),
        (ASK, "retried", False),
    ],
)
def test_an_observation_may_be_the_whole_conversation(messages: Any, why: Any, kept: bool, there: Any) -> None:
    """The model sees what the template writes of it; what was sampled before stays, and counts for the same reward."""
    sampler = Chatty("chatml", ["Hello<|im_end|>", "Bye<|im_end|>"])
    env = there(judged(two_turns({"messages": messages}), lambda task, trace: 2.0))
    batch = rollout(sampler, env, [{}])
    read = sampler.tokenizer
    assert read.decode(sampler.asked[1]) == templated(messages, read, asking=True)
    said = [read.decode(row["input_ids"][row["loss_mask"]].tolist()) for row in batch]
    assert said == (["Hello<|im_end|>Bye<|im_end|>"] if kept else ["Hello<|im_end|>", "Bye<|im_end|>"])
    assert [FORKS[at] for at in batch["forked"].tolist()] == ([""] if kept else ["", why])
    assert batch["rewards"].tolist() == [2.0] * len(batch)
    found = nrl.finalize(nrl.summary(batch))
    assert found["tokens/sampled"] == found["tokens/trained"] == int(batch["loss_mask"].sum())
    assert {name: int(found[f"forks/{name}"]) for name in FORKS[1:] if f"forks/{name}" in found} == (
        {} if kept else {"rewritten": 0, "retried": 0, "template": 0} | {why: 1}
    )
    record = nrl.samples(batch, read)["rows"]
    assert [row.get("why") for row in record] == ([None] if kept else [None, why])


def test_a_question_that_is_asked_again_has_another_answer() -> None:
    """Each turn has noise of its own, also where it begins at the same token; the first has that of its row."""

    def step(said: tuple[Any, ...], turn: Turn) -> Step:
        said = (*said, turn.token_ids)
        return Step(said, done=len(said) == 4, observation={"messages": ASK}, info={"different": len(set(said))})

    env = Environment(lambda task: ((), ASK), step)
    model, sampling = tiny.model(tokenizer=tiny.bpe(["user assistant"])), nrl.Sampling(max_new_tokens=4)
    with nrl.cluster("local") as cluster:
        sampler = hf.sampler(cluster.reserve(1), model, sampling)
        batch = rollout(sampler, env, [{}], n=4)
        assert batch["env/different"].tolist() == [4.0] * len(batch)
        once = rollout(sampler, Environment(env.reset, lambda state, turn: Step(state)), [{}], n=4)
    first = batch["turns"] == 0
    assert batch["input_ids"][first].tolist() == once["input_ids"][once["loss_mask"]].tolist()


def test_what_is_still_true_of_a_conversation_is_kept() -> None:
    """The second answer is shortened, and the first one stays as it was sampled."""
    whole = [*ASK, HELLO, *MORE, {"role": "assistant", "content": "B."}, *SHORT]

    def step(state: int, turn: Turn) -> Step:
        return Step(state + 1, done=state == 2, observation=MORE if state == 0 else {"messages": whole})

    sampler = Chatty("chatml", ["Hello<|im_end|>", "Bye<|im_end|>", "End<|im_end|>"])
    batch = rollout(sampler, Environment(lambda task: (0, ASK), step), [{}])
    assert len(batch) == 2
    first, second = batch["input_ids"].tolist()
    upto = sampler.asked[1].index(sampler.tokenizer.encode("Hello")[0]) + 2  # its end, too
    assert second[:upto] == first[:upto]
    assert sampler.tokenizer.decode(sampler.asked[2]) == templated(whole, sampler.tokenizer, asking=True)
    assert batch["turns"][1].unique().tolist() == [-1, 2]


def test_after_a_text_a_whole_conversation_begins_another_row() -> None:
    sampler = Chatty("chatml", ["Hello<|im_end|>", "Bye<|im_end|>"])
    plain = Environment(
        lambda task: (0, "Hi"), lambda state, _: Step(state + 1, done=state == 1, observation={"messages": ASK})
    )
    batch = rollout(sampler, plain, [{}])
    assert sampler.asked[1] == sampler.tokenizer.encode(templated(ASK, sampler.tokenizer, asking=True))
    assert [FORKS[at] for at in batch["forked"].tolist()] == ["", "rewritten"]


@pytest.mark.parametrize(
    ("observation", "why"),
    [
        ({"role": "user", "content": "x"}, "the observation is one message; return a list of messages"),
        ({"said": []}, r"the observation is {'said': \[\]}; return {'messages': \[...\]} with the whole conversation"),
        ({"messages": "x"}, "the observation is {'messages': 'x'}; return"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [*ASK, HELLO]}, "messages ends with the assistant's message"),
    ],
)
def test_a_whole_conversation_that_is_none_fails_the_row(observation: Any, why: str) -> None:
    with pytest.warns(UserWarning, match=why):
        rollout(Chatty("chatml", ["Hello<|im_end|>"]), two_turns(observation), [{}])


# --- tools


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def put(item: str, basket: State[tuple[str, ...]]) -> NewState:
    """Put an item into the basket."""
    if item == "stone":
        raise ToolError("no stones, please")
    return NewState((*basket, item), result=f"{len(basket) + 1} items")


def called(name: str, **arguments: Any) -> str:
    import json

    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


TOOL_TEMPLATES = {  # and the token that ends a turn
    **dict.fromkeys(("chatml", "qwen2_5", "qwen3", "qwen3_training", "qwen3_5_think"), "<|im_end|>"),
    **dict.fromkeys(("llama3_1", "llama3_2"), "<|eot_id|>"),
    "deepseekv3": "<｜end▁of▁sentence｜>",
    **dict.fromkeys(("mistral_v3", "mistral_v11", "mistral_v13"), "</s>"),
}
OPEN = ("qwen3_5_think", "deepseekv3")  # whose prompt opens reasoning


def says(template: str, text: str, *calls: tuple[str, dict[str, Any]], thought: str = "") -> str:
    """A turn as a model of this template writes it."""
    named = "mistral, named" if template in ("mistral_v11", "mistral_v13") else None
    writer = named or next(name for name, (format, _) in WRITERS.items() if format == read_format(template))
    ids = [f"abcdefgh{at}" if template in ("mistral_v3", "mistral_v11") else None for at in range(len(calls))]
    made = [ToolCall(name, arguments, id) for (name, arguments), id in zip(calls, ids, strict=True)]
    written_calls = written(writer, text, made).whole
    thinks = f"{'' if template in OPEN else '<think>\n'}{thought}\n</think>\n\n" if thought else ""
    return thinks + written_calls + TOOL_TEMPLATES[template]


def read_format(template: str) -> str:
    return tool_format(chat_tokenizer(template).get_chat_template(tools=[tool(add).schema]))


def test_these_are_all_templates_with_tools() -> None:
    found = []
    for name in ["chatml", *(each.stem for each in TEMPLATES.glob("*.jinja"))]:
        with contextlib.suppress(ModelError):
            found.append((read_format(name), name)[1])
    assert sorted(found) == sorted(TOOL_TEMPLATES)


def right(task: Any, trace: Trace) -> float:
    return float(task["answer"] in trace.text)


TASK = {"prompt": "2+3=", "answer": "5"}
THINKS = "<think>\n\n</think>\n\n"


def test_calls_are_made_and_their_results_appended() -> None:
    sampler = Chatty("qwen3", [f"{called('add', a=2, b=3)}<|im_end|>", "It is 5.<|im_end|>"])
    batch = rollout(sampler, tool_use([tool(add)], right), [TASK])
    first, second = (sampler.tokenizer.decode(ids) for ids in sampler.asked)
    assert '"name": "add"' in first
    assert first.endswith("<|im_start|>user\n2+3=<|im_end|>\n<|im_start|>assistant\n")
    assert second.startswith(first + called("add", a=2, b=3) + "<|im_end|>")
    assert "<tool_response>\n5\n</tool_response>" in second
    assert batch["rewards"].tolist() == [1.0]
    assert batch["env/tools/calls"].tolist() == [1.0]
    assert batch["env/tools/malformed"].tolist() == [0.0]
    text = sampler.tokenizer.decode(batch["input_ids"][0][batch["loss_mask"][0]].tolist())
    assert text == f"{called('add', a=2, b=3)}<|im_end|>It is 5.<|im_end|>"


@pytest.mark.parametrize("thought", ["", "I should add."])
@pytest.mark.parametrize("template", TOOL_TEMPLATES)
def test_every_template_with_tools(template: str, thought: str) -> None:
    """One row of one call and one answer, that only grows; the results are as the template writes them."""
    opened = template in OPEN
    first = says(template, "", ("add", {"a": 2, "b": 3}), thought=thought or "Hm" * opened)
    # After a result Qwen 3.5 opens reasoning again, and DeepSeek does not
    sampler = Chatty(template, [first, says(template, "It is 5.", thought="Hm" * (template == "qwen3_5_think"))])
    batch = rollout(sampler, tool_use([tool(add)], right), [TASK])
    assert len(batch) == 1
    assert batch["valid"].tolist() == [True]
    assert batch["rewards"].tolist() == [1.0]
    assert batch["env/tools/calls"].tolist() == [1.0]
    asked, again = sampler.asked
    read = sampler.tokenizer
    start = asked + read.encode(first, add_special_tokens=False)
    assert again[: len(start)] == start
    assert "5" in read.decode(again[len(start) :])
    assert batch["input_ids"][0][: len(again)].tolist() == again
    said = read.decode(batch["input_ids"][0][batch["loss_mask"][0]].tolist())
    assert said.startswith(first)
    assert said.endswith(f"It is 5.{TOOL_TEMPLATES[template]}")


@pytest.mark.parametrize("template", TOOL_TEMPLATES)
def test_calls_after_calls(template: str) -> None:
    """DeepSeek's template writes later calls in another way than its prompt begins: each has a row of its own."""
    opens = "Hm" * (template in OPEN)
    texts = [says(template, "", ("add", {"a": 0, "b": 3}), thought="I begin.")]
    texts += [says(template, "", ("add", {"a": at, "b": 3}), thought=opens) for at in (1, 2)]
    sampler = Chatty(template, [*texts, says(template, "It is 5.", thought=opens)])
    batch = rollout(sampler, tool_use([tool(add)], right), [TASK])
    assert len(batch) == (3 if template == "deepseekv3" else 1)
    assert batch["valid"].all()
    assert len(sampler.asked) == 4
    assert (batch["rewards"] == 1.0).all()
    said = "".join(sampler.tokenizer.decode(row["input_ids"][row["loss_mask"]].tolist()) for row in batch)
    assert said == "".join(texts) + says(template, "It is 5.", thought=opens)  # each token once


@pytest.mark.parametrize("template", TOOL_TEMPLATES)
def test_several_calls_of_a_turn_under_every_template(template: str) -> None:
    """Llama's templates take one call of a message, so the turn is kept as it was written."""
    calls = [("add", {"a": 2, "b": 3}), ("add", {"a": 4, "b": 3})]
    opens = "Hm" * (template in OPEN)
    texts = [says(template, "", *calls, thought=opens), says(template, "It is 5.", thought=opens)]
    sampler = Chatty(template, texts)
    batch = rollout(sampler, tool_use([tool(add)], right), [TASK])
    assert len(batch) == 1
    assert batch["valid"].tolist() == [True]
    assert batch["env/tools/calls"].tolist() == [2.0]


@pytest.mark.parametrize("template", ["chatml", "qwen2_5", "llama3_1", "llama3_2"])
def test_where_no_field_is_read_reasoning_is_in_the_content(template: str) -> None:
    call = ("add", {"a": 2, "b": 3})
    conversation = Conversation([{"role": "user", "content": "2+3="}], [tool(add)], chat_tokenizer(template))
    prompt = conversation.render_prompt(lambda prompt, of: [])
    turn = chat_tokenizer(template).encode(says(template, "", call, thought="I should add."), add_special_tokens=False)
    sampled = Completion(torch.tensor(turn), torch.zeros(len(turn)), truncated=False, version=0)
    conversation.add_turn(sampled, prompt + turn)
    message = conversation._rows[-1].messages[-1]
    assert "I should add." in message["content"]
    assert "reasoning_content" not in message


def test_tools_with_state_see_each_others_work() -> None:
    texts = [f"{called('put', item='tea')}\n{called('put', item='milk')}<|im_end|>"]
    texts += [f"{called('put', item='stone')}<|im_end|>", f"{called('put', item='bread')}<|im_end|>", "Bye 5<|im_end|>"]
    sampler = Chatty("qwen3", texts)
    seen: list[Trace] = []

    def verify(task: Any, trace: Trace) -> float:
        seen.append(trace)
        return 1.0

    rollout(sampler, tool_use([tool(put)], verify, state=lambda task: ()), [TASK])
    answers = [[message["content"] for message in each] for each in seen[0].observations]
    assert answers == [["1 items", "2 items"], ["no stones, please"], ["3 items"]]
    assert [len(turn.calls) for turn in seen[0].turns] == [2, 1, 1, 0]


def test_a_call_that_cannot_be_read_comes_back_to_the_model() -> None:
    broken = '<tool_call>\n{"name": "add", "arguments": {"a": 2,\n</tool_call>'
    sampler = Chatty("qwen3", [f"{broken}<|im_end|>", "5<|im_end|>"])
    batch = rollout(sampler, tool_use([tool(add)], right), [TASK])
    assert "this call was not made" in sampler.tokenizer.decode(sampler.asked[1])
    assert batch["env/tools/malformed"].tolist() == [1.0]
    assert batch["valid"].all()


@pytest.mark.parametrize("template", ["mistral_v3", "mistral_v11", "mistral_v13"])
@pytest.mark.parametrize(
    ("call", "told"),
    [
        ('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 2,', "this call was not made"),
        ('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 2, "b": 40}}]', "42"),
        ('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 2, "b": 40}, "id": "1"}]', "42"),
        ('Well.[TOOL_CALLS]add[ARGS]{"a": 2, "b": 40}', "42"),
    ],
)
def test_calls_without_the_ids_that_a_template_wants_are_answered(template: str, call: str, told: str) -> None:
    """Mistral's template refuses a conversation in which a call or a result has none of nine letters."""
    sampler = Chatty(template, [f"{call}</s>", f"{call}</s>", "It is 5.</s>"])
    batch = rollout(sampler, tool_use([tool(add)], right), [TASK])
    assert (len(batch), batch["valid"].tolist(), batch["rewards"].tolist()) == (1, [True], [1.0])
    asked, again, last = map(sampler.tokenizer.decode, sampler.asked)
    assert again.startswith(f"{asked}{call}</s>[TOOL_RESULTS]")
    assert told in again.removeprefix(asked)
    assert last.startswith(f"{again}{call}</s>[TOOL_RESULTS]")


def test_limits() -> None:
    again = f"{called('add', a=1, b=1)}<|im_end|>"
    batch = rollout(Chatty("qwen3", [again] * 3), tool_use([tool(add)], right, turns=3), [TASK])
    assert batch["rewards"].tolist() == [0.0]  # it ends with the third turn, and is judged
    sampler = Chatty("qwen3", [again, again, "5<|im_end|>"])
    batch = rollout(sampler, tool_use([tool(add)], right, calls=1), [TASK])
    assert "this call was not made: 0 calls were allowed" in sampler.tokenizer.decode(sampler.asked[2])
    assert batch["rewards"].tolist() == [1.0]


def test_tools_need_a_chat() -> None:
    env = Environment(lambda task: (0, [1, 2], [tool(add)]), lambda state, turn: Step(state))
    with pytest.warns(UserWarning, match="the environment has tools, and its prompt is token ids"):
        rollout(Chatty("qwen3", []), env, [{}])
    with pytest.warns(UserWarning, match=r"tool_use: the task has no 'prompt', only 'seed'"):
        rollout(Chatty("qwen3", []), tool_use([tool(add)], right), [{}])


def test_a_model_that_cannot_be_told_of_tools_is_refused_before_it_is_asked() -> None:
    """No episode is to blame, so none fails: the rollout raises, with the model's name."""
    message = "rollout: the environment has tools, .* tokenizer 'some/{}' does not say how to call them .*; take"
    for name in ("gemma3", "glm4moe", "base"):
        sampler = Chatty("gemma3" if name == "base" else name, ["5"])
        sampler.tokenizer = copy.deepcopy(sampler.tokenizer)
        sampler.tokenizer.name_or_path = f"some/{name}"
        if name == "base":
            sampler.tokenizer.chat_template = None
        with pytest.raises(ModelError, match=message.format(name)):
            rollout(sampler, tool_use([tool(add)], right), [TASK, TASK], n=2)
        assert sampler.asked == []


def test_a_chat_with_a_model_without_a_chat_template_is_refused() -> None:
    sampler = Chatty("qwen3", ["5"])
    sampler.tokenizer = copy.deepcopy(sampler.tokenizer)
    sampler.tokenizer.chat_template = None
    with pytest.raises(ModelError, match="the prompt is a chat, and the tokenizer has no chat template"):
        rollout(sampler, two_turns(), [TASK])
    assert sampler.asked == []


def test_an_environment_of_several_keeps_its_tools() -> None:
    env = nrl.envs.by_source(judged(two_turns(), right), tool_use([tool(add)], right))
    sampler = Chatty("qwen3", [f"{called('add', a=2, b=3)}<|im_end|>", "5<|im_end|>"])
    batch = rollout(sampler, env, [{**TASK, "source": 1}])
    assert batch["rewards"].tolist() == [1.0]


def test_reasoning_that_the_prompt_opens_is_no_call() -> None:
    """Qwen 3.5 asks within reasoning; an answer that is cut there has called nothing."""
    sampler = Chatty("qwen3_5_think", [f"I could {called('add', a=2, b=3)} but"])
    seen: list[Trace] = []

    def verify(task: Any, trace: Trace) -> float:
        seen.append(trace)
        return 0.0

    rollout(sampler, tool_use([tool(add)], verify), [TASK])
    assert sampler.tokenizer.decode(sampler.asked[0]).rstrip().endswith("<think>")
    (turn,) = seen[0].turns
    assert (turn.calls, turn.malformed, turn.text) == ((), (), "")
    assert turn.reasoning.startswith("I could")


def test_the_calls_of_all_turns_are_counted() -> None:
    wrong = "<tool_call>\nadd(2, 3)\n</tool_call><|im_end|>"
    texts = [wrong, wrong, f"{called('add', a=2, b=3)}<|im_end|>", "It is 5<|im_end|>"]
    batch = rollout(Chatty("qwen3", texts), tool_use([tool(add)], right), [TASK])
    assert batch["env/tools/calls"].tolist() == [3.0]
    assert batch["env/tools/malformed"].tolist() == [2.0]
    assert nrl.finalize(nrl.summary(batch))["env/tools/malformed"] == 2.0
