"""A window of Chromium on the console; whatever goes wrong in it is kept, and fails the test that opened it."""

import itertools
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from tests.api.serving import Api

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, ConsoleMessage, Page, Request

HERE: Final = Path(__file__).parent

#: Where pictures are kept; git ignores it.
PICTURES: Final = HERE.parents[1] / "artefacts" / "console"

#: Pixels across: a desk, and a phone.
DESK: Final = 1280
PHONE: Final = 375

_LOOK: Final = (HERE / "look.js").read_text()

#: What Chromium says of a page whose status is no success; the test knows that itself.
_STATUS: Final = "Failed to load resource: the server responded with a status of"


class Window:
    """One window; `errors` is what its pages complained of, and what they asked of others."""

    def __init__(self, context: "BrowserContext", api: Api) -> None:
        self.context = context
        self.base = f"http://127.0.0.1:{api.port}"
        self.errors: list[str] = []
        self.asked: list[str] = []
        self.page: Page = context.new_page()
        self.page.set_default_timeout(60_000)
        self.page.on("pageerror", lambda error: self.errors.append(f"error: {error}"))
        self.page.on("console", self._told)
        self.page.on("request", self._requested)
        self.page.on("dialog", lambda dialog: (self.errors.append(f"dialog: {dialog.message}"), dialog.dismiss()))

    def open(self, address: str) -> "Page":
        """Open a page of the console."""
        self.page.goto(self.base + address)
        return self.page

    def sign_in(self, token: str) -> "Page":
        """Sign in as somebody does."""
        page = self.open("/console/sign-in")
        page.get_by_label("Token of the API").fill(token)
        page.get_by_role("button", name="Sign in").click()
        return page

    def narrow(self, width: int) -> None:
        """Make it as wide as a desk's or a phone's."""
        self.page.set_viewport_size({"width": width, "height": 900 if width == DESK else 812})

    def faults(self) -> list[str]:
        """What is wrong with the page as it is drawn: see ``look.js``."""
        found: list[str] = self.page.evaluate(_LOOK)
        return found

    def picture(self, name: str) -> None:
        """Keep a picture of the whole page."""
        PICTURES.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=PICTURES / f"{name}.png", full_page=True, animations="disabled")

    def looked_over(self, name: str) -> list[str]:
        """What is wrong with the page at each width and in each scheme, of each of which a picture is kept."""
        found = []
        for width, scheme in itertools.product((DESK, PHONE), ("light", "dark")):
            self.narrow(width)
            self.page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            found += [f"{name}, {width} px, {scheme}: {fault}" for fault in self.faults()]
            self.picture(f"{name}-{width}-{scheme}")
        self.page.emulate_media(color_scheme="light")
        self.narrow(DESK)
        return found

    @property
    def address(self) -> str:
        """The page's address, without the host."""
        parts = urlsplit(self.page.url)
        return parts.path + (f"?{parts.query}" if parts.query else "")

    @property
    def title(self) -> str:
        """The page's heading."""
        return self.page.locator("h1").inner_text()

    def text(self) -> str:
        """What the page says, in one line."""
        return re.sub(r"\s+", " ", self.page.locator("main").inner_text())

    def close(self) -> None:
        """Close it."""
        self.context.close()

    def _told(self, message: "ConsoleMessage") -> None:
        if message.type in ("error", "warning") and not message.text.startswith(_STATUS):
            self.errors.append(f"{message.type}: {message.text}")

    def _requested(self, request: "Request") -> None:
        self.asked.append(request.url)
        if not request.url.startswith((self.base + "/", "about:", "data:")):
            self.errors.append(f"asked {request.url}")


def launched() -> Any:
    """Chromium, and what stops it; it looks for nothing on any network."""
    from playwright.sync_api import sync_playwright

    driver = sync_playwright().start()
    browser = driver.chromium.launch(
        executable_path=str(found()),
        args=[
            "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
            "--disable-component-update", "--disable-sync", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        ],
    )  # fmt: skip
    return driver, browser


def found() -> Path | None:
    """Where Chromium is, if it is."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        at = shutil.which(name)
        if at:
            return Path(at)
    return None
