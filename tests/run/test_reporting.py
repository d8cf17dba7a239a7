"""The page of a run, as headless Chromium shows it, with no network."""

import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from playwright.sync_api import Browser, FloatRect, Locator, Page, sync_playwright

from nrl import tiny
from nrl.batch import Batch
from nrl.errors import DataError
from nrl.log import JsonLines
from nrl.rollout.sample_records import samples
from nrl.run import charts, report_rows
from nrl.run.charts import Array
from nrl.run.reporting import report, write_page
from nrl.runtime.trace import timeline

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
]
GREEN, RED = "rgba(22, 163, 74, {})", "rgba(220, 38, 38, {})"
KEY = "AKIA" + "ABCDEFGHIJKLMNOP"
EVIL = (
    '</script></title><script>window.hacked = 1</script><img src="http://evil.example/x" onerror="window.hacked = 1">'
)

TOKENS = tiny.tokenizer()

type Opened = Callable[..., Page]


def chromium() -> str:
    """Where a browser is: ``$NRL_CHROMIUM``, or on PATH."""
    for name in (os.environ.get("NRL_CHROMIUM"), "chromium", "chromium-browser", "google-chrome"):
        if name and (found := shutil.which(name)):
            return found
    pytest.fail("no Chromium or Chrome: install one (apt-get install chromium), or set NRL_CHROMIUM to its executable")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=chromium(), args=FLAGS)
        yield launched
        launched.close()


@pytest.fixture
def opened(browser: Browser) -> Iterator[Opened]:
    """Opens a run's report; afterwards, nothing was asked of the network, and nothing went wrong."""
    asked: list[str] = []
    wrong: list[str] = []
    contexts = []

    def open_report(out: Path, scheme: Any = "light", written: Path | None = None) -> Page:
        context = browser.new_context(color_scheme=scheme, viewport={"width": 1280, "height": 800})
        context.set_default_timeout(5000)
        contexts.append(context)

        def decide(route: Any) -> None:
            if route.request.url.startswith("file:"):
                route.continue_()
            else:
                asked.append(route.request.url)
                route.abort()

        context.route("**/*", decide)
        page = context.new_page()
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto((written or report(out)).as_uri())
        return page

    yield open_report
    for context in contexts:
        context.close()
    assert asked == []
    assert wrong == []


def write(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    with JsonLines(path) as lines:
        for record in records:
            lines.write(record)


def row(tokens: Sequence[str], advantages: Sequence[float | None], **other: Any) -> dict[str, Any]:
    size = len(tokens)
    known = {"row": 0, "reward": 1.0, "prompt": "ask", "tokens": tokens, "advantages": advantages}
    return known | {"loss_mask": [True] * size, "rollout_logprobs": [-0.5] * size} | other


def rollouts(*rows: Mapping[str, Any], step: int = 0) -> dict[str, Any]:
    histogram = {"low": 0.0, "high": 1.0, "counts": [3] + [0] * 18 + [1]}
    return {"step": step, "rewards": histogram, "lengths": histogram, "rows": list(rows)}


def chart(page: Page, name: str, loop: int = 1) -> Locator:
    return page.locator(f'#loop-{loop} figure:has(b[title="{name}"])')


def title_of(figure: Locator) -> str:
    return figure.locator("figcaption b").get_attribute("title") or ""


def titles(page: Page) -> list[str]:
    return [title_of(each) for each in page.locator("figure").all()]


def box(locator: Locator) -> FloatRect:
    found = locator.bounding_box()
    assert found is not None
    return found


def points(figure: Locator, path: str = ".line") -> list[tuple[float, float]]:
    drawn = figure.locator(path).first.get_attribute("d") or ""
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.-]+) ([\d.-]+)", drawn)]


def background(locator: Locator) -> str:
    return str(locator.evaluate("each => getComputedStyle(each).backgroundColor"))


def light(colour: str) -> float:
    return sum(map(float, re.findall(r"[\d.]+", colour)[:3])) / 3


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A run with all there is to show."""
    folder = tmp_path / "first-run"
    folder.mkdir()
    (folder / "config.yaml").write_text("steps: 20\nlr: 0.001\n")
    rng = np.random.default_rng(0)
    metrics = [
        {"step": i, "lag": 0.0, "grad_norm": rng.random(), "length": 3 + rng.random(), "loss": 1 / (i + 1)}
        | {"mine": i, "mismatch/kl": i / 1000, "mismatch/ess": 1 - i / 100, "approx_kl": i / 1000}
        | {"reward": i / 19, "time/rollout": 1.0, "time/train": 2.0, "time/total": 3.0}
        | ({"eval/accuracy": i / 20} if i % 5 == 0 else {})
        for i in range(20)
    ]
    write(folder / "metrics.jsonl", metrics)
    write(folder / "warmup.jsonl", [{"step": i, "loss": 2.0 - i} for i in range(3)])
    rows = row(["a", "b", "c", "d"], [2.0, -1.0, 0.0, None]), row(["x"], [0.5], reward=0.0)
    write(folder / "rollouts.jsonl", [rollouts(*rows, step=i) for i in range(20)])
    return folder


def test_a_run_is_shown(out: Path, opened: Opened) -> None:
    page = opened(out)
    assert page.title() == "first-run"
    assert page.locator("h1").inner_text() == "first-run"
    assert page.locator("h2").all_inner_texts() == ["Train", "Warmup"]
    first = ["reward", "eval/accuracy", "length", "approx_kl", "time, s"]
    more = ["rewards", "lengths", "loss", "mismatch/kl", "mismatch/ess", "grad_norm", "mine"]
    assert titles(page) == [*first, *more, "loss"]
    assert page.locator("#loop-1 .headline figure").count() == 5
    assert page.locator("#loop-1 .flat summary").inner_text() == "1 constant metric"
    tiles = page.locator("#loop-1 .tile").all_inner_texts()
    assert [re.split(r"\s*\n\s*", tile.strip()) for tile in tiles] == [
        ["steps", "20"],
        ["reward", "1", "at first 0"],
        ["eval/accuracy", "0.75", "at first 0"],
        ["loss", "0.05", "at first 1"],
        ["time", "1:00", "3 s a step"],
    ]
    assert page.locator(".timeline, .busy").count() == 0
    assert (out / "report.html").stat().st_size < 80_000


def test_curves_are_drawn(out: Path, opened: Opened) -> None:
    page = opened(out)
    for figure in page.locator("figure:has(.line)").all():
        drawn = box(figure.locator(".line"))
        assert drawn["width"] > (200 if figure.locator("xpath=..").get_attribute("class") == "grid" else 120)
        assert drawn["height"] > 80
    reward = points(chart(page, "reward"))
    assert len(reward) == 20
    assert np.allclose(np.diff(reward, axis=0), np.diff(reward, axis=0)[0], atol=0.11)  # a straight line
    assert reward[0][1] > reward[-1][1]  # that rises
    assert len(points(chart(page, "eval/accuracy"))) == len(points(chart(page, "eval/accuracy"), ".dots")) == 4
    assert len(points(chart(page, "loss", loop=2))) == 3


def test_phases_are_stacked(out: Path, opened: Opened) -> None:
    figure = chart(opened(out), "time, s")
    rollout, train = (box(figure.locator(f"path.area{i}")) for i in (0, 1))
    assert train["height"] == pytest.approx(2 * rollout["height"], rel=0.02)  # 2 s and 1 s
    assert train["y"] + train["height"] == pytest.approx(rollout["y"], abs=0.5)


def lab(colour: str) -> Array:
    """An sRGB colour as lightness and two opponent axes, between which distances are those that a person sees."""
    rgb = np.array([float(x) for x in re.findall(r"[\d.]+", colour)[:3]]) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    ratios = to_xyz @ linear / np.array([0.9505, 1.0, 1.089])
    x, y, z = np.where(ratios > 0.008856, np.cbrt(ratios), 7.787 * ratios + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def colours_of_phases(page: Page) -> list[dict[str, str]]:
    """For each chart of times, the colour of each phase, which is the same in the chart and in its legend."""
    charts_of_times = page.locator("figure:has(.key)").evaluate_all(
        """figures => figures.map(figure => {
          const styles = selector => [...figure.querySelectorAll(selector)].map(each => getComputedStyle(each));
          const labels = [...figure.querySelectorAll("small:has(.key)")].map(each => each.textContent);
          const areas = styles("path[class^=area]").map(style => style.fill);
          return [labels, styles(".key").map(style => style.backgroundColor), areas];
        })"""
    )
    assert all(len(labels) == len(keys) and keys == areas for labels, keys, areas in charts_of_times)
    return [dict(zip(labels, keys, strict=True)) for labels, keys, _ in charts_of_times]


def test_a_phase_has_one_colour_in_all_charts(out: Path, opened: Opened) -> None:
    times = {"time/rollout": 1.0, "time/train": 2.0, "time/total": 3.0}
    write(out / "metrics.jsonl", [{"step": i, "reward": i, "time/publish": 0.5} | times for i in range(20, 22)])
    write(out / "warmup.jsonl", [{"step": i} | times for i in range(20, 22)])
    with timeline.recording(out):
        for loop, start in (("train", 100.0), ("warmup", 200.0)):
            timeline.record(timeline.DRIVER, 0, "save", start + 3.0, start + 4.0)
            timeline.record(timeline.DRIVER, 0, f"{loop} 20", start, start + 10.0, loop=loop)
    train, warmup = colours_of_phases(opened(out))
    assert [*train] == ["rollout", "train", "publish", "save"]
    assert [*warmup] == ["data", "train", "save"]
    assert (train["train"], train["save"]) == (warmup["train"], warmup["save"])
    assert len({*train.values(), *warmup.values()}) == 5


def test_colours_of_many_phases_are_told_apart(tmp_path: Path, opened: Opened) -> None:
    second = np.arange(2.0), np.ones(2)
    names = ["rollout", "train", "publish", "save", "data", *(f"phase {i}" for i in range(12))]
    axis = charts.Axis(0, 1, charts.BOX["left"], charts.BOX["right"])
    parts = [
        {"name": "loop", "first": [], "times": [charts.stack(dict.fromkeys(some, second), axis)]}
        for some in (names[:9], names[:4:-1], names)
    ]
    page = write_page(tmp_path, parts, newest=0.0)
    for scheme in ("light", "dark"):
        every = colours_of_phases(opened(tmp_path, scheme, written=page))
        colours = dict(pair for some in every for pair in some.items())
        assert all(colours[name] == colour for some in every for name, colour in some.items())
        places = [lab(colour) for colour in colours.values()]
        assert len(places) == 17
        assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(places, 2)) > 20  # 2.3 is just noticeable


def test_tokens_are_coloured_by_advantage(out: Path, opened: Opened) -> None:
    page = opened(out)
    assert page.locator("h4").all_inner_texts() == ["Step 0", "Step 1", "Step 2", "Step 3"]
    tokens = page.locator(".row").first.locator(".t")
    assert tokens.all_inner_texts() == ["a", "b", "c", "d"]
    assert background(tokens.nth(0)) == GREEN.format(0.75)  # the largest
    assert background(tokens.nth(1)) == RED.format(0.45)  # half of it
    assert background(tokens.nth(2)) == background(tokens.nth(3)) == "rgba(0, 0, 0, 0)"
    hints = [each.get_attribute("title") for each in tokens.all()]
    assert hints[1:] == [f"advantage {x} · logprob −0.5" for x in ("−1", "0", "undefined")]
    legend = page.locator(".legend").inner_text().split("\n")  # a line each, for what is laid out side by side
    assert legend[:3] == ["advantage of a token:", "−2", "2"]


def test_how_busy_the_meshes_were_is_shown_with_a_link_to_the_timeline(out: Path, opened: Opened) -> None:
    with timeline.recording(out):
        timeline.record("trainer", 0, "train_step", 106.0, 110.0)
        timeline.record("sampler <b>", 0, "generate", 100.0, 106.1)
        timeline.record(timeline.DRIVER, 0, "warmup 0", 90.0, 95.0, loop="warmup")
        timeline.record(timeline.DRIVER, 0, "train 0", 100.0, 110.0, loop="train")
    page = opened(out)
    assert busy(page, 1) == "Busy during its steps: trainer 40% sampler <b> 61%"
    trainer, sampler = map(box, page.locator("#loop-1 .meter i").all())
    assert sampler["width"] / trainer["width"] == pytest.approx(61 / 40, rel=0.02)
    assert busy(page, 2) == "Busy during its steps: trainer 0% sampler <b> 0%"
    link = page.locator(".timeline a").first
    assert link.is_visible()
    assert link.evaluate("each => each.href") == (out / "timeline.json").as_uri()
    assert "to open in ui.perfetto.dev or chrome://tracing" in page.locator(".timeline").inner_text()


def busy(page: Page, loop: int) -> str:
    return " ".join(page.locator(f"#loop-{loop} .busy").inner_text().split())


def test_a_timeline_that_is_no_timeline_does_no_harm(out: Path, opened: Opened) -> None:
    (out / "timeline.json").write_text('nothing\n[1, 2]\n{"ph": "X", "name": "x", "pid": 1, "tid": 1}\n{"a": 1}\n\x00')
    page = opened(out)
    assert page.locator(".busy").count() == 0
    assert page.locator(".timeline").count() == 1


def test_what_was_not_sampled_is_grey_like_the_prompt(tmp_path: Path, opened: Opened) -> None:
    write(tmp_path / "rollouts.jsonl", [rollouts(row(["a", "b"], [1.0, 1.0], loss_mask=[True, False]))])
    page = opened(tmp_path)
    colours = [each.evaluate("each => getComputedStyle(each).color") for each in page.locator(".prompt, .t").all()]
    assert colours[0] == colours[2] != colours[1]
    assert background(page.locator(".t").nth(1)) == "rgba(0, 0, 0, 0)"
    assert page.locator(".t").nth(1).get_attribute("title") == "not sampled"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground(out: Path, opened: Opened, scheme: str) -> None:
    page = opened(out, scheme)
    sides = 1 if scheme == "dark" else -1
    for selector in ("body", ".tile b", ".text", ".prompt", "figcaption output"):
        colour = page.locator(selector).first.evaluate("each => getComputedStyle(each).color")
        assert sides * (light(colour) - light(background(page.locator(".card").first))) > 90, selector


def test_the_pointer_tells_the_values_of_all_charts_at_a_step(out: Path, opened: Opened) -> None:
    page = opened(out)
    said = chart(page, "reward").locator("output")
    assert said.inner_text() == "1"
    line = box(chart(page, "reward").locator(".line"))
    page.mouse.move(line["x"] + line["width"] * 10.2 / 19, line["y"] + 20)
    assert said.inner_text() == "step 10 · 0.5263"
    assert chart(page, "eval/accuracy").locator("output").inner_text() == "step 10 · 0.5"
    assert chart(page, "time, s").locator("output").inner_text() == "step 10 · rollout 1 s · train 2 s"
    assert chart(page, "loss", loop=2).locator("output").inner_text() == "0"  # of another loop
    chart(page, "rewards").scroll_into_view_if_needed()
    heat = box(chart(page, "rewards").locator("svg"))
    across, down = (50 / 360) * heat["width"] + 3, heat["height"] * 156 / 180
    page.mouse.move(heat["x"] + across, heat["y"] + down)
    assert chart(page, "rewards").locator("output").inner_text() == "step 0 · 0 to 0.05: 75 %"
    page.mouse.move(0, 0)
    assert said.inner_text() == "1"


def test_distributions_are_shaded_by_share(out: Path, opened: Opened) -> None:
    figure = chart(opened(out), "rewards")
    shades = figure.locator(".shade")
    # a quarter at the top, three quarters at the bottom, in 8 shades of the root of the share
    assert [each.get_attribute("opacity") for each in shades.all()] == ["0.5", "0.875"]
    top, bottom = map(box, shades.all())
    assert top["width"] == bottom["width"] > 250
    assert bottom["y"] > top["y"] + 100


def test_markup_in_texts_is_text(tmp_path: Path, opened: Opened) -> None:
    folder = tmp_path / "<b>run"
    folder.mkdir()
    (folder / "config.yaml").write_text(f"prompt: {EVIL}\n")
    write(folder / "metrics.jsonl", [{"step": 0, "loss": 1.0, EVIL: 1.0}, {"step": 1, "loss": 1.0, EVIL: 2.0}])
    write(folder / "rollouts.jsonl", [rollouts(row([EVIL], [1.0], prompt=EVIL, version=EVIL)) | {EVIL: EVIL}])
    page = opened(folder)
    assert page.evaluate("window.hacked") is None
    assert page.title() == "<b>run"
    assert page.locator(".t").inner_text() == page.locator(".prompt").inner_text() == EVIL
    assert EVIL in titles(page)
    assert page.locator("img, b b").count() == 0
    page.locator(".config summary").click()
    assert page.locator("pre").inner_text() == f"prompt: {EVIL}\n"


def test_characters_that_are_not_seen_get_a_sign(tmp_path: Path, opened: Opened) -> None:
    tokens = ["a\nb", "\t", "\r", "\u202e", "\x00", "", "👩\u200d🚀", "\ud800"]
    write(tmp_path / "rollouts.jsonl", [rollouts(row(tokens, [1.0] * 8))])
    page = opened(tmp_path)
    shown = page.locator(".t").evaluate_all("all => all.map(each => each.textContent)")
    assert shown == ["a↵\nb", "⇥\t", "␍", "U+202E", "U+0000", "", "👩\u200d🚀", "U+D800"]
    assert box(page.locator(".t").nth(5))["width"] > 2  # something to point at


def test_a_gap_is_where_values_are_not_finite(tmp_path: Path, opened: Opened) -> None:
    values = [1.0, 2.0, None, 3.0, math.nan, 4.0, 5.0]
    write(tmp_path / "metrics.jsonl", [{"step": i, "loss": x, "kl": None} for i, x in enumerate(values)])
    page = opened(tmp_path)
    drawn = chart(page, "loss").locator(".line").get_attribute("d") or ""
    assert re.sub(r"[^ML]", "", drawn) == "MLMML"
    assert chart(page, "loss").locator(".flag").inner_text() == "2 not finite"
    assert "At no step finite: kl" in page.locator("body").inner_text()


def test_lines_that_cannot_be_read_are_counted(tmp_path: Path, opened: Opened) -> None:
    lines = ['{"step": 0, "loss": 1}', "[1]", '{"step": 2, "loss": NaN}', '{"step": 3, "loss": 0.5}', '{"step": 4, "lo']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    page = opened(tmp_path)
    assert "2 lines could not be read" in page.locator("p.flag").inner_text()
    assert page.locator(".tile b").first.inner_text() == "3"


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"rows": None, "rewards": 3, "lengths": {"low": None, "high": None, "counts": []}},
        {"rows": [None, {}, {"tokens": "text", "advantages": 3}], "rewards": {"low": 1, "high": 0, "counts": [1]}},
        {"step": "one", "rows": [row(["a", "b"], [], loss_mask=[], reward=[1.0, None], valid=False)]},
        {"step": 10**400, "rows": [row([], [], reward=None, prompt=None)]},
    ],
)
def test_odd_records_are_shown_as_far_as_they_go(tmp_path: Path, opened: Opened, record: dict[str, Any]) -> None:
    (tmp_path / "rollouts.jsonl").write_text(json.dumps(record) + "\n" + json.dumps(rollouts(row(["z"], [1.0]))))
    page = opened(tmp_path)
    assert page.locator(".t").last.inner_text() == "z"
    assert titles(page) == ["rewards", "lengths"]


def test_a_run_without_rollouts_has_no_such_parts(tmp_path: Path, opened: Opened) -> None:
    write(tmp_path / "metrics.jsonl", [{"step": 0, "loss": 1.0}])
    page = opened(tmp_path)
    assert titles(page) == ["loss"]
    assert page.locator(".row, .legend, details, nav").count() == 0
    dot = chart(page, "loss").locator(".dots").get_attribute("d") or ""
    assert re.fullmatch(r"M201\.0 [\d.]+h0", dot)  # one value is in the middle


def test_a_run_that_has_not_begun_shows_its_configuration(tmp_path: Path, opened: Opened) -> None:
    (tmp_path / "config.yaml").write_text("steps: 3\n")
    page = opened(tmp_path)
    assert "No steps have been logged yet." in page.locator("main").inner_text()
    assert page.locator("details").get_attribute("open") is None
    page.locator("summary").click()
    assert page.locator("pre").inner_text() == "steps: 3\n"


def test_the_ends_of_long_texts_are_shown(tmp_path: Path, opened: Opened) -> None:
    tokens = [f"t{i} " for i in range(3000)]
    write(tmp_path / "rollouts.jsonl", [rollouts(row(tokens, [1.0] * 3000, prompt="p" * 5000 + "q"))])
    page = opened(tmp_path)
    shown = page.locator(".t").evaluate_all("all => all.map(each => each.textContent)")
    assert shown == tokens[:1500] + tokens[-500:]
    assert page.locator(".left-out").all_inner_texts() == [
        "… 1,001 characters are not shown …",
        "… 1,000 tokens are not shown …",
    ]


def test_the_record_of_a_batch_is_shown(tmp_path: Path, opened: Opened) -> None:
    tokenizer = tiny.tokenizer()
    ids = torch.tensor([tokenizer.encode("1+1=2"), tokenizer.encode("1+1=3")])
    mask = torch.tensor([[False] * 4 + [True]] * 2)
    columns = {
        "input_ids": ids,
        "loss_mask": mask,
        "rewards": torch.tensor([1.0, 0.0]),
        "advantages": torch.tensor([[1.0], [-1.0]]) * mask,
    }
    write(tmp_path / "rollouts.jsonl", [{"step": 0} | samples(Batch(columns, batch_size=[2]), tokenizer)])
    page = opened(tmp_path)
    assert page.locator(".text").all_inner_texts() == ["1+1=", "2", "1+1=", "3"]
    assert page.locator(".who").all_inner_texts() == ["prompt", "policy"] * 2
    assert [background(each) for each in page.locator(".t").all()] == [GREEN.format(0.75), RED.format(0.75)]


# --- conversations


def part(role: str, first: int, stop: int, **other: Any) -> dict[str, Any]:
    return {"role": role, "tokens": [first, stop], "text": "of the parts"} | other


def talk(**other: Any) -> dict[str, Any]:
    """Two turns, with calls, a result, and a token that the program masked."""
    calls = [{"name": "find", "arguments": {"q": "x & y", "n": [1, None]}}, {"name": "now", "arguments": {}}]
    parts = [
        part("prompt", 0, 3, messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]),
        part("policy", 3, 5, reward=0.25, calls=calls, malformed=[{"text": "<tool", "reason": "cut"}], reasoning="Hmm")
        | {"components": {"right": 1.0, "late": -0.75, "none": None}},
        part("environment", 5, 7, messages=[{"role": "tool", "content": "found\nit"}]),
        part("policy", 7, 10, reward=None, calls=[], malformed=[], reasoning="", content="x"),
        part("environment", 10, 11),
    ]
    tokens = ["a", "b", "res", "ult", "c", "d", "e", "\nend"]
    known = row(tokens, [1.0, -1.0, None, None, 0.5, 0.5, 0.5, None], parts=parts, prompt="system Hi user")
    return known | {"loss_mask": [True, True, False, False, True, False, True, False]} | other


def test_a_conversation_is_shown_turn_by_turn(tmp_path: Path, opened: Opened) -> None:
    own = {"components": {"right": 1.0, "late": -0.5, "none": None}, "env": {"calls": 2.0}, "status": "parse_fail"}
    write(tmp_path / "rollouts.jsonl", [rollouts(talk(**own, cut=True))])
    page = opened(tmp_path)
    who = [re.split(r"\s*\n\s*", each.strip()) for each in page.locator(".part .who").all_inner_texts()]
    assert who == [
        ["prompt"],
        ["turn 1", "reward 0.25", "right 1", "late −0.75", "reasoning 3"],
        ["environment"],
        ["turn 2", "reward undefined"],
        ["environment"],
    ]
    texts = page.locator(".part .text")
    assert texts.nth(0).locator(".message").all_inner_texts() == ["systemBe brief.", "userHi"]
    assert texts.nth(1).locator(".t").all_inner_texts() == ["a", "b"]
    assert texts.nth(1).locator(".call").all_inner_texts() == [
        'callfind(q="x & y", n=[1, null])',
        "callnow()",
        "malformed<tool cut",
    ]
    assert texts.nth(2).locator(".message").evaluate_all("all => all.map(each => each.textContent)") == [
        "toolfound↵\nit"
    ]
    assert texts.nth(3).locator(".t").all_inner_texts() == ["c", "d", "e"]
    assert texts.nth(4).evaluate("each => each.textContent") == "↵\nend"
    tokens = page.locator(".t")
    grounds = [background(each) for each in tokens.all()]
    assert grounds == [GREEN.format(0.75), RED.format(0.75), GREEN.format(0.45), "rgba(0, 0, 0, 0)", GREEN.format(0.45)]
    assert tokens.nth(3).get_attribute("title") == "not trained on · logprob −0.5"
    facts = " ".join(page.locator(".facts").inner_text().split())
    assert facts == "reward 1 row 0 cut parse_fail reward of right 1 late −0.5 environment calls 2"
    left = [box(each)["x"] for each in page.locator(".part .text").all()]
    assert len(set(left)) == 1
    assert left[0] > box(page.locator(".part .who").first)["x"] + 100
    page.set_viewport_size({"width": 380, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") == 380
    assert box(texts.nth(1))["y"] > box(page.locator(".part .who").nth(1))["y"] + 10  # below, where there is no room


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_the_environment_said_is_set_apart(tmp_path: Path, opened: Opened, scheme: str) -> None:
    write(tmp_path / "rollouts.jsonl", [rollouts(talk())])
    page = opened(tmp_path, scheme)
    colours = [background(each) for each in page.locator(".part").all()]
    assert colours[2] == colours[4]
    assert colours[0] == colours[1] == colours[3] == "rgba(0, 0, 0, 0)"
    edges = page.locator(".who").evaluate_all("all => all.map(each => getComputedStyle(each).borderLeftColor)")
    assert edges[1] == edges[3] != edges[0] == edges[2]
    sides = 1 if scheme == "dark" else -1
    for selector in (".call", ".message", ".message > b", ".text.environment", ".reward b"):
        colour = page.locator(selector).first.evaluate("each => getComputedStyle(each).color")
        ground = background(page.locator(".part.answered").first)
        assert sides * (light(colour) - light(ground)) > 60, selector


def test_the_rows_of_an_episode_that_forked_are_together(tmp_path: Path, opened: Opened) -> None:
    fork: dict[str, Any] = {"episode": 5, "forks": 1}
    rows = [
        talk(row=3, **fork, fork=0, shared=0),
        talk(row=4, **fork, fork=1, shared=1234, why="template"),
        talk(row=0, episode=4),
        *(talk(row=10 + at, episode=9, forks=5, fork=at, shared=7) for at in range(6)),
    ]
    write(tmp_path / "rollouts.jsonl", [rollouts(*rows)])
    page = opened(tmp_path)
    assert page.locator(".of-episode").all_inner_texts() == [
        "episode 5, which forked: its first row",
        "episode 5, fork 1 of 1 (template): its first 1234 tokens are those of a row before",
        "episode 9, which forked: its first row",
        *(f"episode 9, fork {at} of 5: its first 7 tokens are those of a row before" for at in (1, 2, 5)),
    ]
    assert page.locator("p.quiet", has_text="not shown").all_inner_texts() == [
        "… 2 rows of this episode are not shown …"
    ]
    cards = page.locator(".row")
    assert cards.count() == 2 + 1 + 4
    first, second, other = (box(cards.nth(at)) for at in range(3))
    assert second["x"] > first["x"] == other["x"]
    assert second["y"] - first["y"] - first["height"] < other["y"] - second["y"] - second["height"]


def test_the_middle_of_a_long_conversation_is_left_out(tmp_path: Path, opened: Opened) -> None:
    """Of 3,000 tokens the first 1,500 and the last 500, whoever wrote them."""
    parts, at = [part("prompt", 0, 2)], 2
    for size in (1400, 50, 200, 100, 100, 600, 100, 450):
        parts.append(part("policy" if len(parts) % 2 else "environment", at, at + size))
        at += size
    tokens = [f"t{i} " for i in range(3000)]
    write(tmp_path / "rollouts.jsonl", [rollouts(row(tokens, [1.0] * 3000, parts=parts, prompt="p"))])
    page = opened(tmp_path)
    who = [each.split("\n")[0] for each in page.locator(".part .who").all_inner_texts()]
    # 0-1400 1400-1450 1450-1500 | 1650-1750 1750-1850 1850-2450 | 2500-2550 2550-3000
    assert who == ["prompt", "turn 1", "environment", "turn 2", "", "turn 4", "environment"]
    shown = page.locator(".t").evaluate_all("all => all.map(each => each.textContent)")
    assert shown == tokens[:1400] + tokens[1450:1500] + tokens[2500:2550]
    assert page.locator(".left-out").all_inner_texts() == [
        "… 150 tokens are not shown …",
        "… 800 tokens are not shown …",
        "… 50 tokens are not shown …",
    ]
    assert page.locator(".text.environment").last.inner_text().startswith("t2550 t2551 ")


def test_markup_in_conversations_is_text(tmp_path: Path, opened: Opened) -> None:
    calls = [{"name": EVIL, "arguments": {EVIL: [EVIL]}}]
    malformed = [{"text": EVIL, "reason": EVIL}]
    parts = [
        part("prompt", 0, 1, messages=[{"role": EVIL, "content": EVIL}]),
        part("policy", 1, 2, reward=EVIL, calls=calls, malformed=malformed, reasoning=EVIL),
        part("environment", 2, 3),
        part("policy", 3, 4),
        part("environment", 4, 5, messages=[{"role": EVIL, "content": EVIL}]),
    ]
    own = {EVIL: 1.0, "right": EVIL}
    evil = row([EVIL] * 4, [1.0] * 4, parts=parts, prompt=EVIL, status=EVIL, components=own, env=own)
    evil |= {"episode": EVIL, "fork": 1, "forks": 1, "shared": EVIL, "why": EVIL}
    write(tmp_path / "rollouts.jsonl", [rollouts(evil)])
    page = opened(tmp_path)
    assert page.evaluate("window.hacked") is None
    assert page.locator("img, script[src], b b").count() == 0
    assert page.locator(".t").all_inner_texts() == [EVIL] * 2
    assert page.locator(".text.environment").first.inner_text() == EVIL
    assert page.locator(".message").count() == 2
    assert EVIL in page.locator(".call").first.inner_text()
    assert EVIL in page.locator(".facts").inner_text()


@pytest.mark.parametrize(
    "parts",
    [
        3,
        [],
        [3],
        [{"role": "policy"}],
        [part("policy", 0, 1)],  # not all of the tokens
        [part("policy", 0, 3)],  # and more
        [part("policy", 0, 1), part("policy", 2, 3)],
        [part("prompt", 0, 5), part("policy", 5, 4), part("policy", 4, 7)],
        [part("prompt", 0, 5), part("prompt", 5, 7)],
        [part("environment", 0, 2)],
        [part("policy", 0, 1), part("god", 1, 2)],
        [part("policy", 0.0, 2.0)],  # type: ignore[arg-type]
        [part("policy", 0, 2), part("policy", [], 2)],  # type: ignore[arg-type]
    ],
)
def test_parts_that_do_not_fit_are_not_shown(parts: Any) -> None:
    (rows,) = report_rows.episodes([row(["x", "y"], [1.0, 1.0], parts=parts, prompt="p")])
    prompt, policy = report_rows.episode(rows)["rows"][0]["parts"]
    assert (prompt["role"], prompt["text"][0]) == ("prompt", "p")
    assert (policy["role"], policy["tokens"][0]["texts"]) == ("policy", ["x", "y"])


def test_the_reward_of_a_single_turn_is_the_rows() -> None:
    rows = [
        row(["x"], [1.0], parts=[part("policy", 0, 1, reward=1.0)]) | more for more in ({}, {"fork": 0, "forks": 1})
    ]
    found = [report_rows.episode(episode)["rows"][0] for episode in report_rows.episodes(rows)]
    assert [each["parts"][0]["reward"] for each in found] == ["", "1"]


def test_what_is_odd_in_a_part_is_left_out(tmp_path: Path, opened: Opened) -> None:
    odd = {
        "calls": [3, {"name": "f"}, {"arguments": {}}],
        "malformed": {"text": 1},
        "reasoning": 3,
        "reward": [1, None],
    }
    parts = [part("policy", 0, 1, **odd), part("environment", 1, 2, messages=[3, {"role": "a"}, {"content": "b"}])]
    parts.append(part("policy", 2, 2))
    own = {"fork": "1", "forks": 2, "components": [1], "env": 3, "status": None}
    write(tmp_path / "rollouts.jsonl", [rollouts(row(["x", "y"], [1.0, 1.0], parts=parts, **own))])
    page = opened(tmp_path)
    assert page.locator(".text").all_inner_texts() == ["x", "y", ""]
    assert page.locator(".call, .message, .of-episode, .own, .flag").count() == 0
    assert "reward 1, undefined" in " ".join(page.locator(".who").first.inner_text().split())


def test_what_samples_write_of_several_turns_is_shown(tmp_path: Path, opened: Opened) -> None:
    ids = torch.tensor([TOKENS.encode("go12no3"), TOKENS.encode("go45no6")])
    mask = torch.tensor([[letter == "x" for letter in "  xx  x"]] * 2)
    columns = {
        "input_ids": ids,
        "loss_mask": mask,
        "rewards": torch.tensor([1.5, 0.0]),
        "token_rewards": torch.tensor([[0.0, 0, 0, 0.5, 0, 0, 1.0], [0.0] * 7]),
        "reward/right": torch.tensor([1.0, math.nan]),
        "advantages": torch.tensor([[1.0], [-1.0]]) * mask,
    }
    write(tmp_path / "rollouts.jsonl", [{"step": 0} | samples(Batch(columns, batch_size=[2]), TOKENS)])
    page = opened(tmp_path)
    assert page.locator(".text").all_inner_texts() == ["go", "12", "no", "3", "go", "45", "no", "6"]
    assert page.locator(".reward").all_inner_texts() == ["reward 0.5", "reward 1", "reward 0", "reward 0"]
    assert page.locator(".own").all_inner_texts() == ["reward of right 1"]


def test_no_secret_of_a_conversation_reaches_the_page(tmp_path: Path) -> None:
    """Also not one that lies across two parts, or that a call or a message has."""
    calls = [{"name": KEY, "arguments": {"q": f"say {KEY}", "api_key": "hunter2hunter2"}}]
    parts = [
        part("prompt", 0, 1, messages=[{"role": "user", "content": KEY}], text=KEY),
        part("policy", 1, 2, calls=calls, malformed=[{"text": KEY, "reason": KEY}], text=KEY[:9]),
        part("environment", 2, 3, text=KEY[9:]),
    ]
    rows = rollouts(row([KEY[:9], KEY[9:]], [1.0, 1.0], prompt=KEY, parts=parts, components={KEY: 1.0}))
    (tmp_path / "rollouts.jsonl").write_text(json.dumps(rows))
    text = report(tmp_path).read_text()
    assert "***" in text
    assert KEY[9:] not in text
    assert "hunter2" not in text


def test_no_secret_reaches_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "correct horse battery")
    folder = tmp_path / KEY
    folder.mkdir()
    (folder / "config.yaml").write_text(f"key: {KEY}\nother: correct horse battery\n")
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 0, KEY: 1.0}))
    (folder / "rollouts.jsonl").write_text(json.dumps(rollouts(row([KEY[:9], KEY[9:]], [1.0, 1.0], prompt=KEY))))
    text = report(folder).read_text()
    assert KEY not in text
    assert KEY[9:] not in text
    assert "correct horse" not in text


def test_the_page_is_replaced_in_one_go(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = report(out).read_text()
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 20, "loss": 9.0}\n')

    def full(self: Path, target: Path) -> Path:
        raise OSError("disk full")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", full)
        with pytest.raises(OSError, match="disk full"):
            report(out)
    assert (out / "report.html").read_text() == before
    assert sorted(path.name for path in out.iterdir() if path.suffix == ".html") == ["report.html"]
    assert report(out).read_text() != before


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"report: out=.*/gone is not a folder; give the folder of a run"):
        report(tmp_path / "gone")
    with pytest.raises(DataError, match=r"has neither a config\.yaml nor a metrics\.jsonl; give the folder of a run"):
        report(tmp_path)


def test_thinning_keeps_the_lowest_and_the_highest_of_each_part() -> None:
    values = np.random.default_rng(0).normal(size=5000)
    values[1000:1100] = np.nan
    curve = charts.curve("loss", np.arange(5000.0), values, charts.Axis(0, 4999, 0, 1))
    kept = curve["steps"].split()
    assert 900 < len(kept) <= 1000
    assert {"0", "4999"} <= set(kept)
    for part in np.array_split(np.arange(5000), 499):
        if np.isfinite(values[part]).any():
            assert {str(part[np.nanargmin(values[part])]), str(part[np.nanargmax(values[part])])} <= set(kept)
    assert any(np.isnan(values[int(step)]) for step in kept)  # so that there is a gap


def test_the_mean_moves_over_neighbours_that_are_finite() -> None:
    values = np.arange(60.0) ** 2
    values[30] = np.nan
    drawn = charts.curve("x", np.arange(60.0), values, charts.Axis(0, 59, 0, 59))
    assert drawn["window"] == 5
    top, bottom = charts.BOX["top"] + 6, charts.BOX["bottom"] - 6
    found = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", drawn["mean"])]
    for place in range(60):
        mean = np.nanmean(values[max(place - 2, 0) : place + 3])
        assert found[place] == pytest.approx(bottom - mean / 59**2 * (bottom - top), abs=0.051)


@pytest.mark.parametrize(
    ("name", "values", "flat"),
    [
        ("mismatch/max_abs", [1.2e-6, 4.1e-6, 2.0e-6], True),
        ("mismatch/max_abs", [1e-6, 1e-5, 3e-6], True),
        ("mismatch/ratio_max", [1.0000013, 1.0000041, 1.0000018], True),
        ("mismatch/ratio_min", [0.9999961, 0.9999978, 0.9999952], True),
        ("loss", [-4e-6, 3e-6, -1e-6], True),
        ("loss", [-4e-6, -3e-6, -1e-6], True),
        ("loss", [4e-8, math.nan, 1e-8], True),
        ("tokens_per_second", [41_000.0, 41_000.04, 41_000.01], True),
        ("reward", [0.5, 0.501, 0.5005], False),
        ("mismatch/kl", [1e-6, 2e-4, 1e-4], False),
        ("tokens", [41_000.0, 41_001.0, 41_000.0], False),
        ("lr", [3e-7, 1e-7, 2e-7], False),
        ("critic/lr", [1e-6, 1e-9, 5e-7], False),
    ],
)
def test_rounding_is_drawn_as_a_flat_line(name: str, values: list[float], flat: bool) -> None:
    steps = np.arange(3.0)
    drawn = charts.curve(name, steps, np.array(values), charts.Axis(0, 2, 0, 100))
    heights = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", drawn["path"])]
    plot = charts.BOX["bottom"] - charts.BOX["top"]
    assert max(heights) - min(heights) < 0.1 * plot if flat else max(heights) - min(heights) > 0.4 * plot
    assert all(charts.BOX["top"] <= height <= charts.BOX["bottom"] for height in heights)
    labels = [label for label, _ in drawn["y"]]
    assert 2 <= len(set(labels)) == len(labels)
    if min(values) >= 0:
        assert not any(label.startswith("−") for label in labels)


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0.0, 1.0, ["0", "0.5", "1"]),
        (-3.0, 11.0, ["0", "5", "10"]),
        (1.0, 1.00002, ["1", "1.00001", "1.00002"]),
        (0.0, 2e-13, ["0", "1e−13", "2e−13"]),
        (7.0, 7.0, ["6.5", "7", "7.5"]),
        (0.0, 25_000.0, ["0", "10000", "20000"]),
    ],
)
def test_ticks_are_round_and_told_apart(low: float, high: float, labels: list[str]) -> None:
    assert [label for label, _ in charts.Axis(low, high, 0, 100).ticks(3)] == labels


def test_histograms_of_other_ranges_share_bins() -> None:
    wide = charts.Histogram(0, 0.0, 20.0, np.ones(20))
    half = charts.Histogram(1, 0.0, 10.0, np.ones(20))  # bins of half the width
    single = charts.Histogram(2, 10.0, 10.0, np.array([7.0]))
    drawn = charts.heatmap("x", [wide, half, single], charts.Axis(0, 2, 0, 1))
    shares = [[float(share) for share in column.split()] for column in drawn["shares"].split(";")]
    assert shares == [[5.0] * 20, [10.0] * 10 + [0.0] * 10, [0.0] * 10 + [100.0] + [0.0] * 9]


def test_many_histograms_are_gathered() -> None:
    some = [charts.Histogram(step, 0.0, 1.0, np.array([step < 500, step >= 500], dtype=float)) for step in range(1000)]
    drawn = charts.heatmap("x", some, charts.Axis(0, 999, 0, 999))
    shares = [[float(share) for share in column.split()] for column in drawn["shares"].split(";")]
    assert len(shares) == 100
    assert shares[0] == [10.0] * 10 + [0.0] * 10
    assert shares[-1] == [0.0] * 10 + [10.0] * 10
