"""The page can be read by everybody: contrast, phones, light and dark, keyboard, screen readers."""

import pytest
from test_dashboard import SEVEN_CHARTS, browser, still  # noqa: F401  (fixtures)

CONTRAST = """
(() => {
  const canvas = document.createElement('canvas').getContext('2d');
  const light = color => {
    canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    const part = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map(v => v / 255)
      .map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * part[0] + .7152 * part[1] + .0722 * part[2];
  };
  const behind = element => {
    for (let at = element; at; at = at.parentElement) {
      const color = getComputedStyle(at).backgroundColor;
      if (!/, 0\\)$|transparent/.test(color)) return color;
    }
  };
  return [...document.querySelectorAll('h1, h2, h3, p, dt, dd, td, th, small, button, .tag, .pill, local-time')]
    .filter(element => element.innerText?.trim() && element.checkVisibility())
    .map(element => {
      const pair = [light(getComputedStyle(element).color), light(behind(element))].sort((a, b) => b - a);
      return [(pair[0] + .05) / (pair[1] + .05), element.outerHTML.slice(0, 80)];
    }).filter(([ratio]) => ratio < 4.5);
})()
"""


@pytest.mark.parametrize("dark, width", [(False, 1280), (True, 1280), (False, 390), (True, 390)])
def test_it_can_be_read_by_everybody(browser, still, dark, width):  # noqa: F811
    page = browser.open(still[0].url, width=width, dark=dark)
    page.wait(SEVEN_CHARTS)
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0  # nothing to scroll sideways
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(18, 19, 22)" if dark else "rgb(247, 247, 245)")
    assert page.evaluate(CONTRAST) == []  # WCAG AA
    names = page.evaluate("[...document.querySelectorAll('.chart')].map(chart => chart.ariaLabel)")
    assert len(names) == 7 and all(names)
    titles = "document.getElementById(section.getAttribute('aria-labelledby')).innerText"
    sections = page.evaluate(f"[...document.querySelectorAll('section')].map(section => {titles})")
    assert len(set(sections)) == len(sections) >= 12 and all(sections)
    assert page.evaluate("[...document.querySelectorAll('table')].every(table => table.caption && table.tHead)")
    assert page.evaluate("document.documentElement.lang") and page.evaluate("document.title").startswith("chat-traffic")


def press(page, key, code, text=""):
    for kind in ("keyDown", "keyUp"):
        event = {"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code, "text": text}
        page.call("Input.dispatchKeyEvent", event)


def test_the_keyboard_reaches_everything(browser, still):  # noqa: F811
    page = browser.open(still[0].url)
    page.wait(SEVEN_CHARTS)
    page.evaluate("localStorage.clear(); showTheme()")
    reached = []
    for _ in range(6):
        press(page, "Tab", 9)
        reached.append(page.evaluate("document.activeElement.ariaLabel || document.activeElement.innerText"))
        if reached[-1].startswith("Theme"):
            press(page, "Enter", 13, "\r")
            press(page, "Enter", 13, "\r")
    assert reached[0] == "Skip to the acceptance length" and reached[1] == "Theme: auto"
    assert {"Drafter versions", "Events, newest first", "Rejected samples by reason", "Serving replicas"} <= set(reached)
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 19, 22)"
    page.call("Page.reload")
    page.wait_load(2)
    page.wait(SEVEN_CHARTS)
    assert page.evaluate("document.getElementById('theme').textContent") == "Theme: dark"
    page.evaluate("localStorage.clear()")


@pytest.mark.parametrize("width", [1280, 390])
def test_a_screen_reader_is_told_what_is_there(browser, still, width):  # noqa: F811
    """The tree that Chromium hands to screen readers; on a phone the versions are laid out as blocks and still a table."""
    page = browser.open(still[0].url, width=width)
    page.wait(SEVEN_CHARTS)
    nodes = [node for node in page.call("Accessibility.getFullAXTree")["nodes"] if not node["ignored"]]
    names = {}
    for node in nodes:
        names.setdefault(node["role"]["value"], []).append(node.get("name", {}).get("value", ""))
    for role in ("button", "link", "image", "meter", "region", "table", "heading"):
        assert names[role] and all(names[role]), (role, names[role])
    assert len(names["image"]) == 7 and any("from 1.2" in name for name in names["image"])
    assert {"Drafter versions", "Rejected samples by reason", "Serving replicas"} == set(names["table"])
    assert names["meter"] == ["receiver buffer"] and len(names["banner"]) == len(names["main"]) == len(names["alert"]) == 1
    # 12 versions, 3 reasons, 2 replicas, and a head for each table, with 6, 3 and 7 columns.
    assert len(names["row"]) == 12 + 3 + 2 + 3 and len(names["columnheader"]) == 6 + 3 + 7
    assert len(names["cell"]) == 12 * 6 + 3 * 3 + 2 * 7
    assert [names["heading"][0], names["heading"][1]] == ["chat-traffic", "Served acceptance length"]


def test_on_a_phone_a_version_and_its_reason_need_no_scrolling(browser, still):  # noqa: F811
    page = browser.open(still[0].url, width=390)
    page.wait(SEVEN_CHARTS)
    boxes = page.evaluate("""[...document.querySelectorAll('#rollout tbody tr')].map(row => {
        const box = row.getBoundingClientRect();
        return [box.left, box.right, box.height, row.lastElementChild.getBoundingClientRect().width]})""")
    assert len(boxes) == 12
    for left, right, height, reason in boxes:
        assert 0 <= left and right <= 390 and height < 100 and reason > 300
