"""An HTML page as its reader's browser shows it: Chromium without a window, driven by Playwright.

``python -m tests.browser``, which ``make browser`` asks first and last, says which Chromium there is and
fails where none starts.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
WIDTH, HEIGHT = 1280, 900

# Pictures are counted in colours that are no greys: a chart without its lines has axes and text, but none.
LOOK = """async () => {
    await document.fonts.ready;
    const pictures = [];
    for (const image of document.images) {
        await image.decode().catch(() => null);
        const picture = {alt: image.alt, width: image.naturalWidth, colours: 0};
        pictures.push(picture);
        if (!picture.width || !image.src.startsWith("data:")) continue;
        const canvas = new OffscreenCanvas(image.naturalWidth, image.naturalHeight);
        const drawn = canvas.getContext("2d");
        drawn.drawImage(image, 0, 0);
        const rgba = drawn.getImageData(0, 0, canvas.width, canvas.height).data, colours = new Set();
        for (let i = 0; i < rgba.length; i += 4) {
            const rgb = [rgba[i], rgba[i + 1], rgba[i + 2]];
            if (Math.max(...rgb) - Math.min(...rgb) > 32) colours.add(rgb.join());
        }
        picture.colours = colours.size;
    }
    const boxes = [...document.querySelectorAll("*")].filter(box => box.clientWidth);
    return {
        title: document.title,
        lang: document.documentElement.lang,
        text: document.body.innerText,
        tables: [...document.querySelectorAll("table")].map(
            table => [...table.querySelectorAll("td")].filter(cell => cell.innerText.trim()).length
        ),
        pictures: pictures,
        wider: Math.max(...boxes.map(box => box.scrollWidth - box.clientWidth))
    };
}"""


@dataclass(frozen=True)
class Picture:
    """An ``<img>``: its width in pixels, 0 where it has not loaded, and its colours that are no greys."""

    alt: str
    width: int
    colours: int


@dataclass(frozen=True)
class Seen:
    """What a page showed, said on the console, and asked for besides itself.

    ``tables`` counts the cells with text; ``wider`` is by how many pixels something sticks out of its box.
    """

    title: str
    lang: str
    text: str
    tables: list[int]
    pictures: list[Picture]
    wider: int
    said: list[str]
    asked: list[str]

    def faults(self) -> list[str]:
        """What no page of ours may have, a sentence each."""
        found = [f"console: {text}" for text in self.said] + [f"asks for {url}" for url in self.asked]
        found += [f"no {name}" for name in ("title", "lang", "text") if not getattr(self, name).strip()]
        for picture in self.pictures:
            if not picture.width:
                found.append(f"picture {picture.alt!r} has not loaded")
            elif picture.colours < 8:
                found.append(f"picture {picture.alt!r} shows nothing: {picture.colours} colours")
            if not picture.alt:
                found.append("a picture without alt text")
        found += [f"table {at} is empty" for at, cells in enumerate(self.tables) if not cells]
        return found + ([f"something is {self.wider} pixels wider than its box"] if self.wider > 1 else [])


def find() -> str | None:
    """The Chromium that ``playwright install`` left, or this system's; ``None``: neither."""
    with sync_playwright() as play:
        own = play.chromium.executable_path
    return next(filter(None, map(shutil.which, (own, *NAMES))), None)


def missing() -> None:
    """Skip a test for want of a browser, or fail it where ``FOREDRAFT_BROWSER=required``."""
    end = pytest.fail if os.environ.get("FOREDRAFT_BROWSER") == "required" else pytest.skip
    end("no Chromium: `make browser` installs one")


@contextmanager
def started(executable: str) -> Iterator[Browser]:
    """A Chromium with an empty profile, which ends with the block."""
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=executable, args=["--disable-gpu", "--disable-quic"])
        yield browser
        browser.close()


def look(browser: Browser, path: Path) -> Seen:
    """Open a file, without a network."""
    with browser.new_context(offline=True, viewport={"width": WIDTH, "height": HEIGHT}) as context:
        page, said, asked = context.new_page(), [], []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path.resolve().as_uri())
        found = page.evaluate(LOOK)
        asked = [url for url in asked if url != page.url and not url.startswith("data:")]
    found["pictures"] = [Picture(**picture) for picture in found["pictures"]]
    return Seen(**found, said=said, asked=asked)


if __name__ == "__main__":
    executable = find()
    if executable is None:
        raise SystemExit("no Chromium")
    with started(executable) as browser:
        print(f"{executable}: Chromium {browser.version}")
