"""The examples whose episodes have several turns: what they learn, and what lies between the turns."""

import asyncio
import re
import runpy
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any, NamedTuple

import pytest

import nrl
from nrl import tiny
from nrl.backends import hf, load_tokenizer
from nrl.backends.types import Model
from nrl.envs import Trace, Turn
from nrl.envs.tools import ToolCall, call
from tests.chat_tokenizers import tokenizer
from tests.jsonlines import lines
from tests.replays import Seen, assert_replayed, balances, recording
from tests.test_examples import ROOT, load

SHORT: dict[str, dict[str, Any]] = {"guess": {"steps": 50, "prompts": 16}, "tools": {"steps": 12}}


class Ran(NamedTuple):
    module: ModuleType
    metrics: list[dict[str, Any]]
    seen: list[Seen]
    tokenizer: Any


@pytest.fixture(scope="module", params=["guess", pytest.param("tools", marks=pytest.mark.slow)])
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A short run with the defaults."""
    module, out = load(request.param), tmp_path_factory.mktemp("runs") / request.param
    with recording(module) as seen:
        module.main(module.Config(out=str(out), evaluate_every=1000, **SHORT[request.param]))
    return Ran(module, lines(out / "metrics.jsonl"), seen, load_tokenizer(Model(str(out / "model"))))


def means(metrics: list[dict[str, Any]], key: str) -> tuple[float, float]:
    """At the beginning, and at the end."""
    return fmean(line[key] for line in metrics[:3]), fmean(line[key] for line in metrics[-3:])


def test_it_learns(ran: Ran) -> None:
    for key in {"reward", "reward/found"} & ran.metrics[0].keys():
        first, last = means(ran.metrics, key)
        print(f"{ran.module.__name__}: {key} from {first:.2f} to {last:.2f}")
        assert first < 0.5
        assert last > first + 0.1


def test_every_sampled_token_is_accounted_for(ran: Ran) -> None:
    assert all(balances(line) for line in ran.metrics)
    assert all(line["invalid"] == 0 and "forks" not in line for line in ran.metrics)
    counted = sum(sum(seen.sampled) for seen in ran.seen)
    assert counted == sum(line["tokens/sampled"] for line in ran.metrics)


def test_what_lies_between_turns_is_what_the_environment_answers(ran: Ran) -> None:
    several = [seen for seen in ran.seen if len(seen.turns) > 2][:: len(ran.seen) // 200 + 1]
    assert len(several) > 20
    for seen in several:
        assert_replayed(ran.module.env, seen, ran.tokenizer)


def test_a_game_reads_as_it_is_played(ran: Ran) -> None:
    """Token by token, by the rules of the game and the template of the chat, without the code that made it."""
    rule = {"example_guess": game, "example_tools": conversation}[ran.module.__name__]
    assert sum(rule(seen, ran.tokenizer) for seen in ran.seen) > 50


def game(seen: Seen, tokenizer: Any) -> bool:
    text, said = tokenizer.decode(seen.token_ids), [tokenizer.decode(tokens) for own, tokens in seen.turns if own]
    written = "1-7\n"
    for turn in said[:-1]:
        digits = re.findall(r"\d+", turn)
        hint = re.match(re.escape(written + turn) + " (higher|lower|a number, please)\n", text)
        assert hint is not None
        written = hint[0]
        assert (hint[1] == "a number, please") == (not digits)
    assert text == written + said[-1]
    assert len(said) <= 3
    return len(said) > 1


def conversation(seen: Seen, tokenizer: Any) -> bool:
    """Of episodes with one call that was made, which then ended."""
    pieces = [(own, tokenizer.decode(tokens)) for own, tokens in seen.turns]
    said = [text for own, text in pieces if own]
    form = r'\{"name": "calculator", "arguments": \{"a": ([1-9]\d*), "sign": "\+", "b": ([1-9]\d*)\}\}'
    found = re.fullmatch(rf"<tool_call>\n{form}\n</tool_call><\|im_end\|>", said[0])
    if len(said) != 2 or not found:
        return False
    schema = load("tools").CALCULATOR.schema
    messages = [
        {"role": "user", "content": seen.task["prompt"][0]["content"]},
        {"role": "assistant", "content": said[0].removesuffix("<|im_end|>")},
        {"role": "tool", "content": f"{float(found[1]) + float(found[2]):.15g}"},
    ]
    text = tokenizer.apply_chat_template(messages, tools=[schema], tokenize=False, add_generation_prompt=True)
    assert "".join(piece for _, piece in pieces) == text + said[1]
    return True


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "least"), [("guess", 0.75), ("tools", 0.75)])
def test_it_learns_with_its_defaults(name: str, least: float, tmp_path: Path) -> None:
    module = load(name)
    nrl.launch(nrl.retrying(module.main), module.Config, [f"out={tmp_path / 'run'}"])
    metrics = lines(tmp_path / "run" / "metrics.jsonl")
    assert means(metrics, "reward")[0] < 0.5
    assert means(metrics, "reward")[1] > least
    assert metrics[-1]["eval/reward"] > least


def test_guess_is_fair() -> None:
    """Who halves what is left finds every number; the number is a function of the seed alone."""
    guess, numbers = load("guess"), set[int]()
    for seed in range(100):
        state, prompt = guess.reset({"seed": seed, "prompt": "?"})
        assert guess.reset({"seed": seed, "prompt": "?"}) == (state, prompt)
        low, high = 1, guess.LARGEST
        while True:
            middle = (low + high) // 2
            taken = guess.step(state, Turn(f"{middle}"))
            if taken.done:
                break
            low, high = (middle + 1, high) if taken.observation == " higher\n" else (low, middle - 1)
            state = taken.state
        assert taken.reward == 1.0
        numbers.add(middle)
    assert numbers == set(range(1, guess.LARGEST + 1))


@pytest.mark.parametrize(
    ("said", "prompt", "observation"),
    [
        ("no idea", "?", " a number, please\n"),
        ("5, or rather 1?", "?", " higher\n"),
        ("9" * 5000, "?", " lower\n"),
        ("0", [{"role": "user", "content": "?"}], [{"role": "user", "content": "higher"}]),
    ],
)
def test_guess_answers_in_the_form_of_the_question(said: str, prompt: Any, observation: Any) -> None:
    guess = load("guess")
    seed = next(n for n in range(100) if guess.reset({"seed": n, "prompt": prompt})[0][0] == 4)
    state, asked = guess.reset({"seed": seed, "prompt": prompt, "turns": 2})
    assert asked == prompt
    taken = guess.step(state, Turn(said))
    assert (taken.done, taken.observation) == (False, observation)
    last = guess.step(taken.state, Turn("no idea"))
    assert (last.done, last.reward, last.info) == (True, 0.0, {"turns_left": 0})


@pytest.mark.parametrize(
    ("a", "sign", "b", "found"),
    [
        *[
            (123, "+", 877, "1000"),
            (0.1, "+", 0.2, "0.3"),
            (2, "-", 5, "-3"),
            (12, "*", 12, "144"),
            (1, "/", 4, "0.25"),
        ],
        *[(1, "/", 0, "nan"), (1e308, "*", 10, "inf"), (1, "^", 2, None), ("1+1", "+", 1, None)],
    ],
)
def test_the_calculator(a: Any, sign: str, b: Any, found: str | None) -> None:
    tools = load("tools")
    (result,), _ = asyncio.run(call([tools.CALCULATOR], [ToolCall("calculator", {"a": a, "sign": sign, "b": b})]))
    assert result.status == ("ok" if found else "invalid")
    assert found is None or result.text == found


def test_a_call_that_finds_the_answer_is_reported() -> None:
    tools = load("tools")
    told = ([{"role": "tool", "content": "12"}],)
    for answer, text, reward, found in [(12, "12", 1.0, 1.0), ("12", "13", 0.0, 1.0), (13, "13", 1.0, 0.0)]:
        score = tools.solved({"answer": answer}, Trace("", ["", text], told))
        assert (score.reward, score.components) == (reward, {"found": found})


def test_the_lessons_of_tools_are_what_they_are_said_to_be() -> None:
    tools = load("tools")
    rows = tools.sums(3)[:400]
    assert rows == tools.sums(3)[:400] != tools.sums(4)[:400]
    kinds = [len(row["response"]) == 3 or "<tool_call>" in row["response"][0]["content"] for row in rows]
    assert sum(kinds) == 200
    for row in rows:
        a, b = map(int, row["prompt"].strip("=").split("+"))
        assert row["answer"] == a + b
        if len(row["response"]) == 3:
            (made,) = row["response"][0]["tool_calls"]
            calls = [ToolCall(**made["function"])]
            (result,), _ = asyncio.run(call([tools.CALCULATOR], calls))
            assert result.text == row["response"][1]["content"] == row["response"][2]["content"] == str(a + b)


@pytest.mark.parametrize("name", SHORT)
def test_the_environment_can_be_taken_from_the_file(name: str) -> None:
    """As a program does that is given FILE.py:env."""
    env = runpy.run_path(str(ROOT / "examples" / f"{name}.py"))["env"]
    model = tiny.model(tokenizer=tiny.bpe([tiny.CHATML]), num_hidden_layers=1)
    with nrl.cluster("local") as cluster:
        sampler = hf.sampler(cluster.reserve(1), model, nrl.Sampling(max_new_tokens=4))
        batch = nrl.rollout(sampler, env, [{"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}], n=4)
    assert batch["valid"].all()


@pytest.mark.parametrize("template", ["chatml", "qwen2_5", "qwen3"])
@pytest.mark.parametrize("name", SHORT)
def test_a_real_model_s_folder_goes_the_same_way(name: str, template: str, tmp_path: Path) -> None:
    """With chats, in its own template."""
    module, words = load(name), tokenizer(template)
    model = tiny.model(tokenizer=words, num_hidden_layers=1, max_position_embeddings=4096)
    tiny.save(model, tmp_path / "model")
    sizes = {"steps": 1, "prompts": 2, "group_size": 2, "sampling": nrl.Sampling(max_new_tokens=4)}
    with recording(module) as seen:
        module.main(module.Config(model=str(tmp_path / "model"), out=str(tmp_path / "run"), **sizes))
    assert len(seen) == 4
    for each in seen:
        assert_replayed(module.env, each, words, context_length=4096)
        assert "<|im_start|>user" in words.decode(each.token_ids)
    (line,) = lines(tmp_path / "run" / "metrics.jsonl")
    assert balances(line)
    assert line["tokens/sampled"] == sum(sum(each.sampled) for each in seen)
    assert (tmp_path / "run" / "model" / "config.json").exists()
