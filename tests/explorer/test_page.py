"""The page in a real browser."""

import dataclasses
import re
import shutil

import pytest
from playwright.sync_api import expect, sync_playwright

import sparsifiner as sp
from sparsifiner.explorer.app import create_app

from ..toys import make_vit
from .conftest import GRID, file_of, noise, serving

expect.set_options(timeout=20_000)  # a neighbour may have the other core

WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser():
    path = shutil.which("chromium")
    if path is None:
        pytest.fail("the page is tested in Chromium, which is not here: `apt-get install chromium`, or `make test`")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def opened(browser, address):
    """Opens pages; in the end no script may have failed, and nobody else may have been asked for anything."""
    contexts, errors, strangers = [], [], []

    def open_page(link="", viewport=WIDE, **options):
        context = browser.new_context(viewport=viewport, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: message.type == "error" and errors.append(message.text))
        page.on("request", lambda request: request.url.startswith(address) or strangers.append(request.url))
        page.goto(address + link)
        ready(page)
        return page

    open_page.errors = errors
    yield open_page
    for context in contexts:
        context.close()
    assert errors == []
    assert strangers == []


def ready(page):
    expect(page.locator("#reading")).to_contain_text("Most attention")


def expect_link(page, part):
    expect(page).to_have_url(re.compile(re.escape(part)))


def click_patch(page, row, column):
    """Counted from 1, as on the page."""
    box = page.locator("#stage").bounding_box()
    x, y = ((number - 0.5) / GRID for number in (column, row))
    page.locator("#stage-canvas").click(position={"x": x * box["width"], "y": y * box["height"]})


def pixels(page, selector):
    """How many colours a canvas shows."""
    return page.locator(selector).evaluate(
        """canvas => {
            const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
            const seen = new Set();
            for (let i = 0; i < data.length; i += 4) seen.add(data[i] * 65536 + data[i + 1] * 256 + data[i + 2]);
            return seen.size;
        }"""
    )


def kept(page):
    """How many keys the page says the chosen patch keeps."""
    return int(re.search(r"keeps (\d+) of", page.locator("#reading").inner_text()).group(1))


def press_slider(page, name, *keys):
    page.locator(f"#{name}").focus()
    for key in keys:
        page.keyboard.press(key)


def test_it_opens(opened):
    page = opened()
    assert pixels(page, "#stage-canvas") > 20
    for name in ("photo", "mask", "used", "full", "estimate"):
        assert pixels(page, f"#map-{name}") > 1, name
    expect(page.locator("#model")).to_contain_text("tiny · 20 × 20 px · 26 tokens · 4 layers")
    assert page.locator("#classes tbody tr").count() >= 5
    expect(page.locator("#costs tbody tr")).to_have_count(3)
    expect(page.locator("#gallery li")).to_have_count(6)
    expect(page.locator("#notes")).to_contain_text("Calibrated on noise.")
    expect(page.locator("#problem")).to_be_hidden()


def test_a_click_chooses_a_patch(opened):
    page = opened()
    click_patch(page, 2, 4)
    expect(page.locator("#reading")).to_contain_text("row 2, column 4")
    expect(page.locator("#patch")).to_contain_text("row 2, column 4")
    expect_link(page, "patch=2,4")


def test_arrow_keys_move_it(opened):
    page = opened("#patch=1,1")
    expect(page.locator("#reading")).to_contain_text("row 1, column 1")
    page.locator("#stage").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#reading")).to_contain_text("row 1, column 2")
    page.keyboard.press("ArrowDown")
    expect(page.locator("#reading")).to_contain_text("row 2, column 2")
    for _ in range(7):
        page.keyboard.press("ArrowLeft")
    expect(page.locator("#reading")).to_contain_text("row 2, column 1")
    page.keyboard.press("End")
    expect(page.locator("#reading")).to_contain_text("row 2, column 5")
    page.keyboard.press("c")
    expect(page.locator("#reading")).to_contain_text("class token: attends to everything")
    page.keyboard.press("ArrowDown")
    expect(page.locator("#reading")).to_contain_text("row 1, column 1")
    page.keyboard.press("]")
    expect(page.locator("#reading")).to_contain_text("Layer 4")
    page.keyboard.press(".")
    expect(page.locator("#reading")).to_contain_text("head 2")
    page.keyboard.press("3")
    expect(page.locator("input[name=map][value=full]")).to_be_checked()


def test_the_keep_slider_works_live(opened):
    page = opened("#layer=2")
    before = kept(page)
    press_slider(page, "keep", "Home")
    expect_link(page, "keep=0.01")
    expect(page.locator("#keep-value")).to_have_text("0.01 · 1 key")
    page.wait_for_function("n => !document.querySelector('#reading').textContent.includes(`keeps ${n} of`)", arg=before)
    assert kept(page) < before
    press_slider(page, "keep", "End")
    expect(page.locator("#reading")).to_contain_text("this layer is dense: the budget of 26 covers all 26 tokens")
    expect(page.locator("#veil")).to_contain_text("Dense layer")
    expect(page.locator("#costs")).to_contain_text("same")
    page.get_by_role("button", name="Reset").click()
    expect(page.locator("#reading")).to_contain_text(f"keeps {before} of")
    assert "keep=" not in page.url


def test_thresholds_residual_and_tile(opened):
    page = opened("#layer=2")
    press_slider(page, "tau", "End")
    expect_link(page, "tau=0.5")
    press_slider(page, "basis_threshold", "Home")
    expect_link(page, "basis=0")
    expect(page.locator("#map-used-note")).to_contain_text("with the residual")
    page.get_by_role("switch", name="Residual").click()
    expect_link(page, "residual=off")
    expect(page.locator("#map-used-note")).to_have_text("what is computed")
    page.locator("#tile").select_option("2x2")
    expect_link(page, "tile=2x2")
    expect(page.locator("#problem")).to_be_hidden()


def test_layer_and_head(opened):
    page = opened("#layer=1&head=1")
    page.locator("#layer-3").click()
    expect(page.locator("#reading")).to_contain_text("Layer 4, head 1")
    page.locator("#heads label").nth(2).click()
    expect(page.locator("#reading")).to_contain_text("Layer 4, head 3")
    expect_link(page, "layer=4&head=3")


def test_maps_are_laid_over_the_picture(opened):
    page = opened("#show=photo")
    photo = page.locator("#stage").screenshot()
    page.locator("#maps label").nth(3).click()
    expect_link(page, "show=full")
    heat = page.locator("#stage").screenshot()
    assert heat != photo
    page.get_by_role("switch", name="Smooth").click()
    assert page.locator("#stage").screenshot() != heat
    press_slider(page, "opacity", "Home")
    expect(page.locator("#legend-text")).to_contain_text("share of this patch")


def drop(page, content, name, kind="image/png"):
    page.evaluate(
        """([bytes, name, type]) => {
            const data = new DataTransfer();
            data.items.add(new File([new Uint8Array(bytes)], name, { type }));
            for (const name of ["dragenter", "dragover", "drop"]) {
                const event = new DragEvent(name, { dataTransfer: data, bubbles: true, cancelable: true });
                document.body.dispatchEvent(event);
            }
        }""",
        [list(content), name, kind],
    )


def test_an_image_is_dropped_opened_and_let_go(opened, app):
    sessions = app.state.explorer.sessions
    before = sessions.counts()
    page = opened()
    drop(page, file_of(noise(7)), "dropped.png")
    expect(page.locator("#credit")).to_contain_text("dropped.png: yours, not part of the link")
    ready(page)
    assert "image=" not in page.url
    file = {"name": "opened.jpg", "mimeType": "image/jpeg", "buffer": file_of(noise(8), "JPEG")}
    page.locator("#file").set_input_files(file)
    expect(page.locator("#credit")).to_contain_text("opened.jpg")
    expect(page.locator("#thumbnails .own")).to_have_count(2)
    assert sessions.counts() == (before[0] + 1, before[1] + 2)
    page.goto("about:blank")
    for _ in range(100):
        if sessions.counts() == before:
            break
        page.wait_for_timeout(50)
    assert sessions.counts() == before


def test_what_is_no_image_is_said_to_be(opened):
    page = opened()
    drop(page, b"<svg xmlns='http://www.w3.org/2000/svg'/>", "drawing.svg", "image/svg+xml")
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("drawing.svg: this is no image the page can read")
    click_patch(page, 1, 1)
    expect(page.locator("#reading")).to_contain_text("row 1, column 1")
    expect(alert).to_be_hidden()
    assert len(opened.errors) == 1
    assert "415" in opened.errors.pop()  # Chromium logs every answer that is no success


def test_a_shared_link_shows_the_same(opened):
    place = "#image=image-2.png&layer=2&head=2&patch=4,2&show=estimate"
    link = f"{place}&keep=0.5&tau=0.05&basis=0.01&residual=off&tile=2x2&tokens=0.9"
    page = opened(link)
    expect(page.locator("#reading")).to_contain_text("Layer 2, head 2, row 4, column 2")
    expect(page.locator("#credit")).to_contain_text("image 2.png")
    expect(page.locator("#keep")).to_have_value("0.5")
    expect(page.locator("#keep-value")).to_contain_text("13 keys")
    expect(page.locator("#tau-value")).to_have_text("0.05")
    expect(page.locator("#basis_threshold-value")).to_have_text("0.01")
    expect(page.locator("#residual")).not_to_be_checked()
    expect(page.locator("#tile")).to_have_value("2x2")
    expect(page.locator("#drops")).to_be_checked()
    expect(page.locator("#token_keep-value")).to_have_text("keeps 0.9")
    expect(page.locator("input[name=map][value=estimate]")).to_be_checked()
    assert page.url.endswith(link)
    words = page.locator("#reading").inner_text()
    other = opened(page.url.rpartition("/")[2])
    expect(other.locator("#reading")).to_have_text(words)
    page.evaluate("location.hash = '#layer=1&head=3&patch=1,5'")  # another link in the same page
    expect(page.locator("#reading")).to_contain_text("Layer 1, head 3, row 1, column 5")
    expect(page.locator("#credit")).to_contain_text("image 2.png")


def test_a_link_that_does_not_fit_is_complained_of(opened):
    page = opened("#image=nothing&layer=99&patch=9,9&keep=7&tile=9x9")
    alert = page.get_by_role("alert")
    for words in ("image “nothing”", "layers 1 to 4", "5 × 5 patches", "keep “7”", "tile “9x9”"):
        expect(alert).to_contain_text(words)
    page.get_by_role("button", name="Dismiss").click()
    expect(alert).to_be_hidden()


def test_dropped_tokens_are_hatched_and_cannot_be_chosen(opened):
    page = opened("#layer=4&patch=3,3")
    whole = page.locator("#stage").screenshot()
    page.get_by_role("switch", name="Drop tokens").click()
    expect_link(page, "tokens=0.7")
    expect(page.locator("#layer-3")).to_have_attribute("title", re.compile("14 tokens"))
    assert page.locator("#stage").screenshot() != whole
    for cell in range(GRID * GRID):  # most are gone here
        click_patch(page, cell // GRID + 1, cell % GRID + 1)
        if page.get_by_role("alert").is_visible():
            break
    expect(page.get_by_role("alert")).to_contain_text("was dropped before layer 4")
    here = cell // GRID + 1, cell % GRID + 1
    page.locator("#layer-0").click()
    click_patch(page, *here)
    expect(page.locator("#reading")).to_contain_text(f"Layer 1, head 1, row {here[0]}, column {here[1]}")
    page.locator("#layer-3").click()
    expect(page.locator("#reading")).to_contain_text("this patch was dropped before this layer")
    expect(page.locator("#veil")).to_contain_text("Choose one that is not hatched")
    page.locator("#stage").focus()
    page.keyboard.press("c")
    expect(page.locator("#reading")).to_contain_text("class token")


def background(page):
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def test_dark_follows_the_system_and_the_button(opened):
    light, dark = opened(color_scheme="light"), opened(color_scheme="dark")
    assert background(light) != background(dark)
    button = dark.get_by_role("button", name="Dark")
    expect(button).to_have_attribute("aria-pressed", "true")
    button.click()
    assert background(dark) == background(light)
    dark.reload()
    ready(dark)
    assert background(dark) == background(light)  # it is remembered


def test_nothing_sticks_out_of_a_narrow_screen(opened):
    page = opened(viewport=NARROW, has_touch=True, is_mobile=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]
    stage = page.locator("#stage").bounding_box()
    assert stage["width"] > 300
    click_patch(page, 5, 5)
    expect(page.locator("#reading")).to_contain_text("row 5, column 5")
    page.set_viewport_size({"width": 320, "height": 640})
    assert page.evaluate("document.documentElement.scrollWidth") <= 320


def test_everything_has_a_name_and_can_be_reached(opened):
    page = opened()
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("input, button, select, a[href], [tabindex]")]
            .filter(found => !found.labels?.length && !found.ariaLabel && !found.textContent.trim())
            .map(found => found.outerHTML)"""
    )
    assert nameless == []
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.name"))
    wanted = {"share", "theme", "file", "image", "layer", "head", "stage", "map", "reset"}
    wanted |= {"keep", "tau", "basis_threshold", "residual", "tile", "drops"}
    assert wanted <= reached
    assert page.locator("#reading").get_attribute("aria-live") == "polite"
    page.locator("#stage").focus()
    assert page.evaluate("getComputedStyle(document.querySelector('#stage')).outlineStyle") == "solid"


def test_a_server_that_is_gone_is_said_to_be(browser, app):
    with serving(app) as address:
        page = browser.new_page()
        page.goto(address)
        ready(page)
    click_patch(page, 1, 1)
    expect(page.get_by_role("alert")).to_contain_text("The server does not answer")
    page.close()


def test_a_model_that_opens_cells(browser, subject):
    student = sp.sparsify(make_vit(depth=2), sp.SparseConfig(0.3, pattern="cells"))
    app = create_app(dataclasses.replace(subject, student=student))
    errors: list[str] = []
    with serving(app) as address, browser.new_context(viewport=WIDE) as context:
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(address)
        ready(page)
        for hidden in ("#basis", "#tau", "#basis_threshold"):
            expect(page.locator(hidden)).to_be_hidden()
        expect(page.locator("#residual-name")).to_have_text("Standing cells")
        expect(page.locator("#patch")).to_contain_text(
            "opens cells of at most 4 of 26 keys"
        )  # the last layer has less than the mean
        assert pixels(page, "#map-mask") > 1
        page.locator("#tile").select_option("2x2")
        expect_link(page, "tile=2x2")
        expect(page.locator("#problem")).to_be_hidden()
    app.state.explorer.engine.close()
    assert errors == []
