"""The samples of a report: their pages, filters and files, as headless Chromium shows them, with no network."""

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from nrl.run import sample_pages
from nrl.run.reporting import report
from tests.log.test_number_text import EXAMPLES
from tests.run.test_reporting import EVIL, Opened, browser, opened, rollouts, row, write

__all__ = ["browser", "opened"]


def sample(place: int, text: str, **other: Any) -> dict[str, Any]:
    return row(list(text), [1.0] * len(text), row=place, prompt=f"ask {place}") | other


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Four steps of three groups of two samples."""
    records = []
    for step in range(4):
        rows = [
            sample(
                place,
                f"answer {step}.{place}",
                group=place // 2,
                source=["sums", "words"][place % 2],
                reward=place / 5 if place else None,
                valid=place > 0,
                truncated=place == 5,
            )
            for place in range(6)
        ]
        records.append(rollouts(*rows, step=step))
    write(tmp_path / "rollouts.jsonl", records)
    return tmp_path


def texts(page: Page) -> list[str]:
    return [each.inner_text() for each in page.locator(".row .part.policy .text").all()]


def field(page: Page, label: str) -> Locator:
    return page.locator(f'.field:has(label:text-is("{label}")) :is(input, select)')


def status(page: Page) -> str:
    return page.locator(".status").inner_text()


def wait_for_title(page: Page, title: str) -> None:
    expect(page.locator("h4").first).to_have_text(title)


def press(page: Page, label: str) -> list[str]:
    page.get_by_role("button", name=label, exact=True).click()
    return page.locator("h4").all_inner_texts()


def test_pages_steps_and_groups_are_turned(out: Path, opened: Opened) -> None:
    page = opened(out)
    assert status(page) == "1–8 of 24 samples"
    assert texts(page) == [f"answer 0.{place}" for place in range(6)] + ["answer 1.0", "answer 1.1"]
    groups = ["Step 0 · group 0", "Step 0 · group 1", "Step 0 · group 2", "Step 1 · group 0"]
    assert page.locator("h4").all_inner_texts() == groups
    assert press(page, "next group")[0] == "Step 0 · group 1"
    assert press(page, "next step")[0] == "Step 1 · group 0"
    assert press(page, "previous group")[0] == "Step 0 · group 2"
    assert press(page, "next page")[0] == "Step 2 · group 0"
    assert press(page, "previous step")[0] == "Step 1 · group 0"
    for _ in range(5):
        press(page, "next step")
    assert status(page) == "19–24 of 24 samples"
    assert press(page, "previous page")[-1] == "Step 2 · group 2"
    field(page, "per page").select_option("50")
    assert status(page) == "1–24 of 24 samples"
    assert page.locator(".row").count() == 24


def test_samples_are_filtered(out: Path, opened: Opened) -> None:
    page = opened(out)
    field(page, "step from").fill("2")
    assert status(page) == "1–8 of 12 samples"
    field(page, "source").select_option("words")
    assert texts(page) == [f"answer {step}.{place}" for step in (2, 3) for place in (1, 3, 5)]
    field(page, "reward from").fill("0.5")
    assert texts(page) == [f"answer {step}.{place}" for step in (2, 3) for place in (3, 5)]
    show = field(page, "show")
    assert show.locator("option").all_inner_texts() == ["all", "invalid", "truncated", "valid", "not truncated"]
    show.select_option("truncated")
    assert texts(page) == ["answer 2.5", "answer 3.5"]
    show.select_option("not truncated")
    assert texts(page) == ["answer 2.3", "answer 3.3"]
    field(page, "search").fill("WER 3")  # across tokens
    assert texts(page) == ["answer 3.3"]
    field(page, "search").fill("nowhere")
    assert (texts(page), status(page)) == ([], "0 samples")
    for label in ("step from", "reward from", "search"):
        field(page, label).fill("")
    field(page, "source").select_option("all")
    show.select_option("invalid")
    assert texts(page) == [f"answer {step}.0" for step in range(4)]
    assert page.locator(".row .flag").all_inner_texts() == ["invalid"] * 4


@pytest.mark.slow
def test_the_browser_is_used_by_keyboard(out: Path, opened: Opened) -> None:
    page = opened(out)
    for control in page.locator(".filters :is(input, select)").all():
        assert control.evaluate("each => each.labels.length") == 1
    field(page, "search").focus()
    page.keyboard.type("answer 2")
    assert texts(page) == [f"answer 2.{place}" for place in range(6)]
    field(page, "per page").focus()
    for _ in range(6):  # buttons follow
        page.keyboard.press("Tab")
    page.keyboard.press("Space")
    assert status(page) == "1–6 of 6 samples"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "conversation"


def contrast(page: Page, selector: str) -> float:
    """Of a text and the first ground behind it, by WCAG 2."""
    return float(
        page.locator(selector).first.evaluate(
            """element => {
              const parse = colour => colour.match(/[\\d.]+/g).map(Number);
              const shine = colour => parse(colour).slice(0, 3).map(value => value / 255)
                .map(value => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4))
                .reduce((sum, value, i) => sum + value * [0.2126, 0.7152, 0.0722][i], 0);
              let ground = element;
              while ((parse(getComputedStyle(ground).backgroundColor)[3] ?? 1) === 0) ground = ground.parentElement;
              const pair = [shine(getComputedStyle(element).color), shine(getComputedStyle(ground).backgroundColor)];
              return (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
            }"""
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_controls_and_flags_stand_out(out: Path, opened: Opened, scheme: str) -> None:
    page = opened(out, scheme)
    for selector in (".filters label", ".pager button", ".status", ".row .flag", ".facts span", "h4", ".filters input"):
        assert contrast(page, selector) >= 4.5, selector


@pytest.mark.slow
def test_numbers_in_the_page_follow_the_rule_of_the_log(out: Path, opened: Opened) -> None:
    page = opened(out)
    values = [(value, text) for value, text in EXAMPLES if re.fullmatch(r"-?[\d.e+-]+", repr(value))]
    assert len(values) > 20
    shown = page.evaluate("values => values.map(value => formatNumber(value))", [value for value, _ in values])
    assert shown == [text.replace("-", "−") for _, text in values]
    assert page.evaluate("[formatNumber(3.21e-7, 0), formatNumber(null), formatNumber(NaN)]") == [
        "3.21e−7",
        "undefined",
        "undefined",
    ]


# --- more samples than a page holds


@pytest.fixture
def many(out: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sample_pages, "_WITHIN", 5000)
    monkeypatch.setattr(sample_pages, "_CHUNK", 3000)
    return out


def test_all_of_many_samples_are_read_from_files_beside_the_page(many: Path, opened: Opened) -> None:
    page = opened(many)
    expect(page.locator(".status")).to_have_text("1–8 of 24 samples")
    files = sorted(path.name.partition("-")[2] for path in (many / "report_samples").iterdir())
    assert files == ["0-0.js", "0-1.js", "0-2.js", "0-3.js", "0-index.js"]
    press(page, "next step")
    wait_for_title(page, "Step 1 · group 0")
    field(page, "step from").fill("3")
    wait_for_title(page, "Step 3 · group 0")
    assert texts(page) == [f"answer 3.{place}" for place in range(6)]
    field(page, "step from").fill("")
    field(page, "search").fill("answer 2.4")
    expect(page.locator(".list .row")).to_have_count(1)
    assert (texts(page), status(page)) == (["answer 2.4"], "1–1 of 1 sample")
    assert page.locator(".note").inner_text() == ""


@pytest.mark.slow
def test_a_page_that_is_sent_alone_says_what_it_lacks(many: Path, browser: Browser, tmp_path: Path) -> None:
    path = report(many)
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(path, alone)
    with browser.new_context() as context:
        page = context.new_page()
        page.goto((alone / "report.html").as_uri())
        expect(page.locator(".note")).not_to_be_empty()
        count = int(re.findall(r"of (\d+) samples", status(page))[0])
        assert 4 <= count < 24
        assert page.locator(".note").inner_text() == (
            f"This page has an even selection of {count} samples. All 24 were in the folder report_samples, which is "
            "not beside it; copy the folder along with the page."
        )
        steps = {title.partition(" · ")[0] for title in page.locator("h4").all_inner_texts()}
        assert steps == {f"Step {step}" for step in range(4)}


def test_files_of_an_earlier_report_are_removed(many: Path) -> None:
    report(many)
    beside = many / "report_samples"
    (beside / "mine.txt").write_text("not of a report")
    before = {path.name for path in beside.glob("*.js")}
    with (many / "rollouts.jsonl").open("a") as file:
        file.write(json.dumps(rollouts(sample(0, "late"), step=4)) + "\n")
    report(many)
    after = {path.name for path in beside.glob("*.js")}
    assert len(after) == len(before) + 1 == 6
    assert before.isdisjoint(after)
    (many / "rollouts.jsonl").write_text(json.dumps(rollouts(sample(0, "alone"), step=4)) + "\n")
    report(many)
    assert [path.name for path in beside.iterdir()] == ["mine.txt"]


@pytest.mark.slow
def test_of_files_that_are_too_large_an_even_selection_is_shown(
    out: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_pages, "READ", (out / "rollouts.jsonl").stat().st_size // 3 + 1)
    page = opened(out)
    assert status(page) == "1–8 of 8 samples"
    assert texts(page) == [f"answer {step}.{place}" for step in range(4) for place in (0, 3)]
    assert page.locator(".note").inner_text() == (
        "rollouts.jsonl is larger than 256 MB, so one of 3 samples is here; the others are in that file alone."
    )


NASTY = [
    EVIL,
    "<!--<script>",
    "]]>",
    "\u2028\u2029",
    "\ud800 lone",
    "\udfff\ud800",
    "\x00\x1b[31m",
    "__proto__",
    "${x}`",
    "\\u003c",
    '"',
    "&amp;",
    "𝒳👩\u200d🚀",
]


@pytest.mark.parametrize("limit", [pytest.param(10_000_000, marks=pytest.mark.slow), 100])
def test_hostile_texts_are_texts_in_the_page_and_beside_it(
    tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(sample_pages, "_WITHIN", limit)
    rows = []
    for text in NASTY:
        parts = [
            {"role": "prompt", "tokens": [0, 1], "messages": [{"role": text, "content": text}]},
            {"role": "policy", "tokens": [1, 2], "calls": [{"name": text, "arguments": {text: text}}], "reward": text},
        ]
        own = {"components": {text: 1.0}, "group": text, "source": text, "status": text, "parts": parts}
        rows.append(row([text], [1.0], prompt=text, reward=[text], version=text) | own)
    (tmp_path / "rollouts.jsonl").write_text(json.dumps(rollouts(*rows)))
    page = opened(tmp_path)
    field(page, "per page").select_option("50")
    expect(page.locator(".list .row")).to_have_count(len(NASTY))
    assert (tmp_path / "report_samples").exists() == (limit == 100)
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("({}).rows") is None
    assert page.locator("img, .list script").count() == 0
    shown = page.locator(".t").evaluate_all(
        "all => all.map(each => [...each.childNodes].map(node => node.nodeType === 3 ? node.data : '').join(''))"
    )
    hidden = re.compile("[\x00\x1b\u2028\u2029\ud800-\udfff]")
    assert shown == [hidden.sub("", text) for text in NASTY]
    signs = page.locator(".t i").evaluate_all("all => all.map(each => each.textContent)")
    assert signs == ["U+2028", "U+2029", "U+D800", "U+DFFF", "U+D800", "U+0000", "U+001B"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_hundred_thousand_samples(tmp_path: Path, opened: Opened) -> None:
    """The page is small and quick, and every sample can be found."""
    with (tmp_path / "rollouts.jsonl").open("w") as file:
        for step in range(1000):
            rows = [
                row([f"token{i} " for i in range(40)] + [f"needle-{step}-{place}"], [float(place % 2)] * 41)
                | {"row": place, "group": place // 4, "reward": place % 2, "truncated": place == 7}
                | {"rollout_logprobs": [-i / 41 for i in range(41)]}
                for place in range(100)
            ]
            file.write(json.dumps(rollouts(*rows, step=step)) + "\n")
    began = time.process_time()
    path = report(tmp_path)
    assert time.process_time() - began < 120
    assert path.stat().st_size < 3_000_000
    beside = list((tmp_path / "report_samples").iterdir())
    assert sum(each.stat().st_size for each in beside) < (tmp_path / "rollouts.jsonl").stat().st_size
    assert max(each.stat().st_size for each in beside) < 10_000_000

    page = opened(tmp_path, written=path)
    began = time.monotonic()
    page.reload()
    expect(page.locator(".status")).to_have_text("1–8 of 100,000 samples", timeout=60_000)
    assert time.monotonic() - began < 10
    began = time.monotonic()
    field(page, "step from").fill("987")
    field(page, "show").select_option("truncated")
    expect(page.locator(".status")).to_have_text("1–8 of 13 samples", timeout=60_000)
    wait_for_title(page, "Step 987 · group 1")
    assert time.monotonic() - began < 10
    field(page, "step from").fill("")
    field(page, "show").select_option("all")
    began = time.monotonic()
    field(page, "search").fill("needle-998-17")
    expect(page.locator(".status")).to_have_text("1–1 of 1 sample", timeout=120_000)
    assert time.monotonic() - began < 60
    assert texts(page)[0].endswith("needle-998-17")
