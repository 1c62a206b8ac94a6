"""The page of a run in a real browser; `nox -s page` installs what these tests need."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import ckpt
from tests.support.command import ckpt_process, environment

sync_api = pytest.importorskip("playwright.sync_api", reason="nox -s page runs these tests")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
if CHROMIUM is None:
    pytest.skip("there is no chromium on this machine", allow_module_level=True)
# Pictures of the page, for people to look at.
PICTURES = os.environ.get("CKPT_PAGE_PICTURES")
# The page asks for news every two seconds.
SECONDS = 30
EVIL = "<img src=x onerror=document.title='hit'>"


def state_of(step: int) -> dict[str, Any]:
    layers = {f"layer_{n}": {"kernel": jnp.full((32, 32 * (n + 1)), float(step))} for n in range(6)}
    return {"params": layers, "same": jnp.zeros(8), "count": step, EVIL: 1}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        # Root may not use the sandbox; the page is our own.
        options = {"executable_path": CHROMIUM, "args": ["--no-sandbox"]}
        browser = playwright.chromium.launch(**options)
        yield browser
        browser.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Any]:
    with ckpt.sync.CheckpointManager(tmp_path / "run") as mgr:
        for step in (10, 20, 30):
            mgr.save(step, state_of(step), metrics={"loss": 1 / step, EVIL: 1.0}, durable=True)
        mgr.pin(20, "paper")
        yield mgr


@pytest.fixture
def url(manager: Any) -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "ckpt", "ui", str(manager.directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment(),
    )
    assert process.stdout is not None
    yield process.stdout.readline().strip()
    process.kill()
    process.communicate()


def showing(page: Any, selector: str, text: str) -> None:
    """Wait until an element has a text."""
    sync_api.expect(page.locator(selector)).to_contain_text(text, timeout=SECONDS * 1000)


class Opened:
    """A page, and what went wrong on it."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.page = browser.new_page(**({"viewport": {"width": 1200, "height": 900}} | options))
        self.wrong: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda told: self.wrong.append(told.text))
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(url)
        self.page.wait_for_selector("#leaves tr")

    def text(self, selector: str) -> str:
        found: str = self.page.inner_text(selector)
        return found


def test_it_shows_the_run_and_follows_it(browser: Any, url: str, manager: Any) -> None:
    opened = Opened(browser, url)
    page = opened.page
    assert opened.text("h1") == str(manager.directory)
    assert opened.text("#step-title") == "Step 30"
    assert page.locator("#steps tr").count() == 3
    assert "pinned: paper" in opened.text("#steps")
    assert "1 pinned" in opened.text("#chart-text")
    assert "Training could go on" in opened.text("#save-text")
    # As long as the user has not chosen a step, the latest is shown.
    manager.save(40, state_of(40), metrics={"loss": 0.1}, durable=True)
    showing(page, "#step-title", "Step 40")
    sync_api.expect(page.locator("#steps tr")).to_have_count(4)
    page.get_by_role("button", name="20", exact=True).click()
    showing(page, "#step-title", "Step 20")
    manager.save(50, state_of(50), durable=True)
    sync_api.expect(page.locator("#steps tr")).to_have_count(5, timeout=SECONDS * 1000)
    assert opened.text("#step-title") == "Step 20"
    assert opened.wrong == []
    # Nothing is asked of another host.
    assert {each.split("/")[2] for each in opened.asked} == {url.split("/")[2]}


def test_it_shows_what_is_deleted_next_and_what_is_being_saved(
    browser: Any, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    with ckpt.sync.CheckpointManager(root, keep=ckpt.keep.Latest(2)) as mgr:
        for step in (10, 20):
            mgr.save(step, state_of(step), durable=True)
        mgr.wait_until_finished()
    # What a writer leaves that was killed: an attempt without a lease that lives.
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    program = (
        "import ckpt, jax.numpy as jnp\n"
        "def die(event):\n"
        f"    if event.phase == 'write': {killed}\n"
        f"with ckpt.sync.CheckpointManager({str(root)!r}, observers=[die]) as mgr:\n"
        "    mgr.save(30, {'w': jnp.zeros(1 << 20)}, durable=True)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=False, timeout=60, env=environment())
    file = tmp_path / "run.html"
    assert ckpt_process("ui", root, "--export", file).status == 0
    opened = Opened(browser, file.as_uri())
    assert "Step 30 was left unfinished by a dead writer" in opened.text("#others")
    assert opened.wrong == []


def test_texts_from_a_checkpoint_are_no_markup(browser: Any, url: str) -> None:
    opened = Opened(browser, url)
    assert EVIL in opened.text("#steps-head")
    assert opened.page.locator("img").count() == 0
    assert "hit" not in opened.page.title()


def test_search_and_treemap(browser: Any, url: str) -> None:
    opened = Opened(browser, url)
    page = opened.page
    page.get_by_label("Search").fill("layer_3")
    assert page.locator("#leaves tr").count() == 1
    assert "params.layer_3.kernel" in opened.text("#leaves")
    page.get_by_label("Search").fill("")
    tile = page.get_by_role("button", name="params.layer_5")
    tile.click()
    assert "params.layer_5" in page.get_by_label("Search").input_value()
    assert page.locator("#leaves tr").count() == 1
    # The tiles fill their area, and none is outside.
    page.get_by_label("Search").fill("")
    area = page.locator("#treemap").bounding_box()
    boxes = [each.bounding_box() for each in page.locator("#treemap button").all()]
    covered = sum(each["width"] * each["height"] for each in boxes)
    assert 0.97 < covered / (area["width"] * area["height"]) < 1.03


def test_the_difference_of_two_steps(browser: Any, url: str) -> None:
    opened = Opened(browser, url)
    page = opened.page
    page.wait_for_selector("#diff tr")
    assert opened.text("#diff-text") == "7 leaves differ, 2 are the same."
    assert "same" not in opened.text("#diff")
    assert "count" in opened.text("#diff")
    page.get_by_label("since step").select_option("10")
    showing(page, "#diff", "int 10")


def exported(browser: Any, root: Path, tmp_path: Path) -> Opened:
    file = tmp_path / "run.html"
    assert ckpt_process("ui", root, "--export", file).status == 0
    return Opened(browser, file.as_uri())


def test_values_that_differ_late_are_different(browser: Any, tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path / "run") as mgr:
        for step, end in ((1, "A"), (2, "B")):
            mgr.save(step, {"text": "x" * 100 + end, "w": jnp.zeros(2)})
    opened = exported(browser, tmp_path / "run", tmp_path)
    assert opened.text("#diff-text") == "1 leaf differs, 1 is the same."


def test_what_cannot_be_compared_is_not_called_different(browser: Any, tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path / "run") as orbax:
        for step in (1, 2):
            orbax.save(step, args=ocp.args.StandardSave({"a": jnp.arange(4.0)}))
    opened = exported(browser, tmp_path / "run", tmp_path)
    assert "1 leaf cannot be compared" in opened.text("#diff-text")
    assert " B" not in opened.text("#about")


def test_large_numbers_are_shown_as_they_are(browser: Any, tmp_path: Path) -> None:
    numbers = [2**53, 2**53 + 1, 10**18 + 1]
    with ckpt.sync.CheckpointManager(tmp_path / "run") as mgr:
        for number in numbers:
            mgr.save(number, state_of(3), custom_metadata={"seed": number})
    opened = exported(browser, tmp_path / "run", tmp_path)
    page = opened.page
    assert page.locator("#steps button").all_inner_texts() == [*map(str, reversed(numbers))]
    page.get_by_role("button", name=str(2**53 + 1), exact=True).click()
    showing(page, "#step-title", f"Step {2**53 + 1}")
    assert page.locator("#steps tr[aria-current]").count() == 1
    assert f'{{"seed":{2**53 + 1}}}' in opened.text("#summary")
    assert page.get_by_label("since step").input_value() == str(2**53)
    page.keyboard.press("j")
    showing(page, "#step-title", f"Step {2**53}")
    assert opened.wrong == []


def test_metrics_may_be_called_like_methods(browser: Any, tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path / "run") as mgr:
        mgr.save(1, {"w": jnp.zeros(2)}, metrics={"toString": 1.0, "constructor": 2.0})
        mgr.save(2, {"w": jnp.zeros(2)})
    opened = exported(browser, tmp_path / "run", tmp_path)
    assert opened.page.locator("#steps tr").count() == 2
    assert opened.wrong == []


def signed_run(root: Path) -> Path:
    """Save a run with vital signs, in which a layer gets NaN at steps 30 and 40."""
    with ckpt.sync.CheckpointManager(root, extensions=[ckpt.extensions.VitalSigns()]) as mgr:
        for step in (10, 20, 30, 40, 50):
            state = state_of(step)
            if step in (30, 40):
                kernel = state["params"]["layer_2"]["kernel"]
                state["params"]["layer_2"]["kernel"] = kernel.astype(float).at[0].set(jnp.nan)
            mgr.save(step, state, durable=True)
    return root


def test_norms_over_steps(browser: Any, tmp_path: Path) -> None:
    opened = exported(browser, signed_run(tmp_path / "run"), tmp_path)
    page = opened.page
    # The layer with values that are not finite is shown first.
    assert page.locator("#layer").input_value() == "params.layer_2"
    assert "2 steps with values that are not finite, first step 30" in opened.text("#norms-text")
    assert page.locator("#norms rect.bad").count() == 2
    assert "are in 2 steps of the run: 30, 40" in opened.text("#norms-notes")
    page.get_by_role("button", name="params.layer_0", exact=True).last.click()
    assert page.locator("#layer").input_value() == "params.layer_0"
    assert "Norm of params.layer_0 in 5 steps: 320 to 1600" in opened.text("#norms-text")
    assert page.locator("#norms rect.bad").count() == 0
    assert page.locator("#norms circle").count() == 5
    assert opened.wrong == []


def test_a_run_without_vital_signs_has_no_norms(browser: Any, url: str) -> None:
    opened = Opened(browser, url)
    sync_api.expect(opened.page.locator("#norms-section")).to_be_hidden()
    assert opened.wrong == []


@pytest.mark.parametrize("width", [390, 1200])
def test_norms_can_be_read_by_everybody(browser: Any, tmp_path: Path, width: int) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    root, file = signed_run(tmp_path / "run"), tmp_path / "run.html"
    assert ckpt_process("ui", root, "--export", file).status == 0
    opened = Opened(browser, file.as_uri(), viewport={"width": width, "height": 900})
    sync_api.expect(opened.page.locator("#norms-section")).to_be_visible()
    found = axe.Axe().run(opened.page)
    assert found.violations_count == 0, found.generate_report()
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize(("width", "best"), [(390, 1), (1200, 2)])
def test_the_metric_of_the_policy_is_drawn_large_and_over_steps_to_scale(
    browser: Any, tmp_path: Path, width: int, best: int
) -> None:
    steps = (0, 10, 20, 100)
    keep = ckpt.keep.Any(ckpt.keep.All(), ckpt.keep.Best(best, "loss", "min"))
    with ckpt.sync.CheckpointManager(tmp_path / "run", keep=keep) as mgr:
        for step in steps:
            mgr.save(step, state_of(step), metrics={"accuracy": step, "loss": 1 / (step + 1)})
    file = tmp_path / "run.html"
    assert ckpt_process("ui", tmp_path / "run", "--export", file).status == 0
    page = Opened(browser, file.as_uri(), viewport={"width": width, "height": 900}).page
    assert page.get_by_label("Metric").input_value() == "loss"
    assert page.locator("#steps-head th").all_inner_texts()[1:3] == ["loss", "accuracy"]
    chart = page.locator("#chart").bounding_box()
    dots = [each.bounding_box() for each in page.locator("#chart circle").all()]
    places = [each["x"] + each["width"] / 2 for each in dots]
    shares = [(place - places[0]) / (places[-1] - places[0]) for place in places]
    assert shares == pytest.approx([step / steps[-1] for step in steps], abs=0.02)
    line = max(each["y"] for each in dots) - min(each["y"] for each in dots)
    ticks = [each.bounding_box() for each in page.locator("#chart rect.step").all()]
    assert len(ticks) == len(steps)
    assert line > 4 * max(each["height"] for each in ticks)
    assert max(each["width"] for each in ticks) <= 5
    assert chart["height"] >= 200
    # Texts have one size, and none leaves the window or lies on another.
    texts = [each.bounding_box() for each in page.locator("#chart text").all()]
    assert all(each["height"] >= 10 for each in texts)
    assert all(chart["x"] - 3 <= each["x"] <= chart["x"] + chart["width"] for each in texts)
    labels = sorted(texts[2:], key=lambda each: each["x"])
    ends = [each["x"] + each["width"] for each in labels[:-1]]
    assert all(end < each["x"] for end, each in zip(ends, labels[1:], strict=True))
    # What is said of the run has a line of its own where the window is narrow.
    assert page.locator("#about").bounding_box()["width"] > 250
    if PICTURES:
        page.screenshot(path=str(Path(PICTURES, f"metric-{width}.png")), full_page=True)


def test_a_click_in_the_chart_shows_the_step_there(browser: Any, url: str) -> None:
    page = Opened(browser, url).page
    page.locator("#chart rect.column").nth(1).click()
    showing(page, "#step-title", "Step 20")


def test_the_keyboard_is_enough(browser: Any, url: str) -> None:
    opened = Opened(browser, url)
    page = opened.page
    page.keyboard.press("j")
    showing(page, "#step-title", "Step 20")
    page.keyboard.press("k")
    showing(page, "#step-title", "Step 30")
    page.keyboard.press("/")
    page.keyboard.type("layer_1")
    assert page.locator("#leaves tr").count() == 1
    # By the tabulator alone, every control can be reached.
    page.reload()
    page.wait_for_selector("#leaves tr")
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate("document.activeElement.id || document.activeElement.textContent")
        )
    assert {"theme", "metric", "copy", "search", "base", "10", "30"} <= reached


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1200])
def test_it_can_be_read_by_everybody(browser: Any, url: str, scheme: str, width: int) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    viewport = {"width": width, "height": 900}
    opened = Opened(browser, url, color_scheme=scheme, viewport=viewport)
    found = axe.Axe().run(opened.page)
    assert found.violations_count == 0, found.generate_report()
    # Nothing but the tables is wider than the window.
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    if PICTURES:
        file = Path(PICTURES, f"page-{scheme}-{width}.png")
        opened.page.screenshot(path=str(file), full_page=True)


def test_the_button_changes_between_dark_and_light(browser: Any, url: str) -> None:
    page = Opened(browser, url, color_scheme="light").page
    colour = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(colour)
    page.get_by_role("button", name="Dark or light").click()
    assert page.evaluate(colour) != light
    page.get_by_role("button", name="Dark or light").click()
    assert page.evaluate(colour) == light


def test_the_snippet_restores_the_step(browser: Any, url: str) -> None:
    opened = Opened(browser, url)
    found: dict[str, Any] = {}
    exec(opened.text("#snippet"), found)
    assert int(found["state"]["count"]) == 30
    assert set(found["state"]["params"]) == set(found["part"]) == {f"layer_{n}" for n in range(6)}


def test_an_exported_file_works_without_a_server(
    browser: Any, manager: Any, tmp_path: Path
) -> None:
    file = tmp_path / "run.html"
    assert ckpt_process("ui", manager.directory, "--export", file, "--steps", "2").status == 0
    opened = Opened(browser, file.as_uri())
    assert opened.text("#step-title") == "Step 30"
    assert "7 leaves differ" in opened.text("#diff-text")
    opened.page.get_by_role("button", name="10", exact=True).click()
    opened.page.wait_for_selector("#failure:not([hidden])")
    assert "Export more" in opened.text("#failure")
    assert opened.wrong == []
    assert [each for each in opened.asked if not each.startswith("file:")] == []


def test_a_root_that_is_deleted_is_said(browser: Any, url: str, manager: Any) -> None:
    opened = Opened(browser, url)
    root = Path(manager.directory)
    root.rename(root.with_name("elsewhere"))
    opened.page.wait_for_selector("#failure:not([hidden])")
    assert f"{root} is gone" in opened.text("#failure")
    root.with_name("elsewhere").rename(root)
    opened.page.wait_for_selector("#failure[hidden]", state="attached")


def test_a_server_that_is_gone_is_said(browser: Any, manager: Any) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "ckpt", "ui", str(manager.directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment(),
    )
    assert process.stdout is not None
    opened = Opened(browser, process.stdout.readline().strip())
    process.kill()
    process.communicate()
    opened.page.wait_for_selector("#failure:not([hidden])")
    assert "cannot be read" in opened.text("#failure")
