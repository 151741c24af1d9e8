"""A browser for pages on disk: Chromium, driven by Selenium."""

from __future__ import annotations

import base64
import shutil
from pathlib import Path
from typing import Any

BINARIES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
# nothing may be loaded from elsewhere: no name is resolved
OFFLINE = "--host-resolver-rules=MAP * ~NOTFOUND"


def missing() -> str | None:
    """What keeps a browser from being started here; None if nothing does."""
    if not any(shutil.which(name) for name in BINARIES):
        return "there is no Chromium: apt-get install chromium chromium-driver"
    if not shutil.which("chromedriver"):
        return "there is no chromedriver: apt-get install chromium-driver"
    try:
        import selenium  # noqa: F401 - only whether it is there
    except ImportError:
        return "there is no selenium: it is in the extra `dev`"
    return None


class Browser:
    """One page at a time, at a width, light or dark."""

    def __init__(self) -> None:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        options = webdriver.ChromeOptions()
        options.binary_location = next(filter(None, map(shutil.which, BINARIES)))
        for flag in (*FLAGS, OFFLINE):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        service = Service(shutil.which("chromedriver"))
        self.driver = webdriver.Chrome(options=options, service=service)

    def quit(self) -> None:
        self.driver.quit()

    def open(self, page: Path, width: int = 1280, dark: bool = False) -> None:
        """Load a page and wait until its script is through."""
        self.size(width)
        self.emulate(dark=dark)
        self.driver.get(page.resolve().as_uri())
        self.wait("return document.documentElement.dataset.ready === 'true'")

    def wait(self, script: str) -> None:
        """Waits until a script returns something true. Raises TimeoutException after 30 seconds."""
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.driver, 30).until(lambda driver: driver.execute_script(script))

    def size(self, width: int, height: int = 900) -> None:
        sizes = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", sizes)

    def emulate(self, dark: bool = False, medium: str = "") -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        media = {"media": medium, "features": [scheme]}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def messages(self) -> list[str]:
        """What the page wrote to the console, errors included, since this was last asked."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def picture(self, x: float, y: float, width: float, height: float) -> bytes:
        """A part of the page as PNG."""
        clip = {"x": x, "y": y, "width": width, "height": height, "scale": 1}
        wanted = {"format": "png", "captureBeyondViewport": True, "clip": clip}
        made = self.driver.execute_cdp_cmd("Page.captureScreenshot", wanted)
        return base64.b64decode(made["data"])
