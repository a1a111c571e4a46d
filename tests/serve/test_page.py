"""Host. The playground in a browser: streams, colours, the switch, errors, a phone's width, the keyboard alone."""

import shutil

import pytest

from jaxspec.config.server import ServerConfig
from tests.serve.fake import ANSWER, FakeEngine, serving

pytestmark = [pytest.mark.heavy, pytest.mark.filterwarnings("ignore::ResourceWarning")]


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (requirements/dev.txt)")
    executable = shutil.which("chromium") or shutil.which("chromium-browser")
    if executable is None:
        pytest.skip("there is no chromium here (Debian's package of that name)")
    with api.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def engine():
    return FakeEngine(block=4, max_model_len=2000)


@pytest.fixture
def page(browser, engine, tmp_path):
    with serving(engine) as client:
        page = browser.new_page()
        page.faults = []
        page.on("pageerror", lambda error: page.faults.append(str(error)))
        page.on("console", lambda message: page.faults.append(message.text) if message.type == "error" else None)
        page.goto(f"http://127.0.0.1:{client.port}/")
        yield page
        page.screenshot(path=str(tmp_path / "page.png"), full_page=True)
        page.close()


def until(page, expression):
    """Wait for it to be true; not the browser's own way, which the page's security policy forbids."""
    for _ in range(500):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(10)
    raise AssertionError(f"waited too long for {expression}")


def ask(page, text="hello"):
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def test_an_answer_streams_in_colours_and_its_tokens_tell(page, engine):
    engine.hold = True
    ask(page)
    page.wait_for_selector(".answer .bonus")
    assert page.text_content(".answer") == ANSWER[:4]
    assert page.is_disabled("#send")
    engine.hold = False
    page.wait_for_selector("#send:not([disabled])")
    assert page.text_content(".answer") == ANSWER
    origins = page.eval_on_selector_all(".answer span", "spans => spans.map(span => span.className)")
    assert origins == (["accepted"] * 3 + ["bonus"]) * (len(ANSWER) // 4)
    page.hover(".answer span:nth-child(2)")
    assert "kept" in page.text_content("#about")
    assert "0.135" in page.text_content("#about"), "the target's probability, e^-2"
    assert "point mass" in page.text_content("#about")
    until(page, "document.querySelectorAll('#positions tr').length === 8")
    assert page.text_content("#positions tr:nth-child(3)").endswith("100 %")
    assert page.text_content("#positions tr:nth-child(4)").endswith("0 %")
    ask(page, "you")
    page.wait_for_selector(".turn:nth-child(4)")
    page.wait_for_selector("#send:not([disabled])")
    said = "".join(engine.letters[i] for i in engine.prompts[-1])
    assert said == f"user:hello\nassistant:{ANSWER}\nuser:you\nassistant:"
    assert page.faults == []


def test_the_switch_is_for_one_answer(page, engine):
    for is_on in (False, True):
        if not is_on:
            page.uncheck("#speculate")
        ask(page)
        page.wait_for_selector("#send:not([disabled])")
        until(page, f"document.querySelectorAll('.answer').length === {1 + is_on}")
        page.wait_for_selector("#send:not([disabled])")
        assert page.is_checked("#speculate")
    assert [params.max_drafts for params in engine.params] == [0, None]
    until(page, "document.querySelector('#ratio').textContent !== '–'")
    assert float(page.text_content("#ratio")) > 0


def test_errors_are_shown_and_the_next_question_is_taken(page, engine):
    engine.fail_after_steps = 1
    ask(page)
    until(page, "document.querySelector('#error').textContent.includes('log says why')")
    engine.fail_after_steps = None
    ask(page)
    until(page, f"[...document.querySelectorAll('.answer')].pop().textContent === {ANSWER!r}")
    assert page.text_content("#error") == ""
    page.fill("#temperature", "-1")
    page.eval_on_selector("#temperature", "field => field.removeAttribute('min')")
    ask(page)
    until(page, "document.querySelector('#error').textContent.includes('temperature')")


def test_stop_frees_the_row(page, engine):
    engine.hold = True
    ask(page)
    page.wait_for_selector(".answer .bonus")
    page.keyboard.press("Escape")
    page.wait_for_selector("#send:not([disabled])")
    for _ in range(200):
        if not engine.running:
            break
        page.wait_for_timeout(10)
    assert engine.running == set()
    assert "stopped" in page.text_content(".turn:nth-child(2) .who")


def test_the_keyboard_alone_and_a_phone(page, engine):
    page.set_viewport_size({"width": 360, "height": 640})
    page.keyboard.type("hello")  # the field has the focus
    page.keyboard.press("Enter")
    until(page, f"document.querySelector('.answer')?.textContent === {ANSWER!r}")
    page.wait_for_selector("#send:not([disabled])")
    page.focus(".answer")
    page.keyboard.press("ArrowRight")
    assert '"t"' in page.text_content("#about")
    page.keyboard.press("ArrowDown")
    assert '"' + ANSWER[10] + '"' in page.text_content("#about")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    order = []
    page.focus("#prompt")
    for _ in range(5):
        page.keyboard.press("Tab")
        order.append(page.evaluate("document.activeElement.id"))
    assert order == ["speculate", "temperature", "tokens", "send", "clear"]


def test_a_key_is_asked_for(browser):
    with serving(FakeEngine(), ServerConfig(api_key="sesame")) as client:
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{client.port}/")
        until(page, "document.querySelector('#error').textContent.startsWith('401')")
        page.fill("#key", "sesame")
        page.press("#key", "Tab")
        until(page, "document.querySelector('#model').textContent === 'fake'")
        assert page.text_content("#error") == ""
        page.close()
