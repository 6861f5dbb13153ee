"""A headless Chromium for the tests of the report, and for its picture in the README.

python tests/report/browser.py PAGE PICTURE   takes that picture: one spike and its largest culprit
"""

from __future__ import annotations

import base64
import io
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image
from selenium import webdriver

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --window-size=1280,1000"
)
PICTURE_WIDTH, PICTURE_HEIGHT = 1160, 700
# What is left out of the picture, so that its text can be read at that size.
LEFT_OUT = "#chips, #why, #legend, .panes .hint, .panes details { display: none }"


def start(profile: str | Path) -> webdriver.Chrome:
    """Starts a browser that keeps its console and its requests for `get_log`.

    Args:
        profile (str | Path): An empty directory.

    Raises:
        FileNotFoundError: The browser is not installed.
    """
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not chromedriver:
        raise FileNotFoundError(
            "Chromium and its driver are not installed; on Debian: apt-get install chromium chromium-driver"
        )
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in FLAGS.split():
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={profile}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(chromedriver))
    driver.set_page_load_timeout(300)
    return driver


def take_picture(page: Path, picture: Path) -> None:
    with tempfile.TemporaryDirectory() as profile:
        driver = start(profile)
        try:
            metrics = {"width": PICTURE_WIDTH, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
            driver.get(page.resolve().as_uri())
            add = "document.head.append(Object.assign(document.createElement('style'), {textContent: arguments[0]}))"
            driver.execute_script(add, LEFT_OUT)
            edge = "return document.querySelector(arguments[0]).getBoundingClientRect()[arguments[1]] + scrollY"
            top = driver.execute_script(edge, "#detail .card", "top") - 8
            height = driver.execute_script(edge, "#todo", "bottom") + 8 - top
            clip = {"x": 0, "y": top, "width": PICTURE_WIDTH, "height": height, "scale": 1}
            options = {"clip": clip, "captureBeyondViewport": True}
            png = base64.b64decode(driver.execute_cdp_cmd("Page.captureScreenshot", options)["data"])
        finally:
            driver.quit()
    # A few hundred colours less are not seen, and make a third of the size.
    image = Image.open(io.BytesIO(png)).convert("RGB")
    image.thumbnail((PICTURE_WIDTH, PICTURE_HEIGHT), Image.Resampling.LANCZOS)
    image.quantize(256, dither=Image.Dither.NONE).save(picture, optimize=True)


if __name__ == "__main__":
    take_picture(Path(sys.argv[1]), Path(sys.argv[2]))
