"""Draw the reports of runs for these pages.

    python docs/make_report_images.py runs/sft docs/images/sft_gsm8k.png
    python docs/make_report_images.py runs/dpo docs/images/dpo_pairs.png
    python docs/make_report_images.py runs/grpo docs/images/report_grpo.png 600    # the first rows alone

It needs Chromium, which ``NRL_CHROMIUM`` may name.
"""

import os
import shutil
import sys
from pathlib import Path

from nrl.run.reporting import report

WIDTH = 1200  # pixels


def take_picture(run: Path, picture: Path, height: int | None = None) -> None:
    """Write the report of a run, and a picture of it in light colors.

    Args:
        run: the folder of the run.
        picture: the PNG file to write.
        height: pixels, from the top; None: the whole page.
    """
    from playwright.sync_api import sync_playwright

    browser = os.environ.get("NRL_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox", "--disable-gpu"])
        page = launched.new_page(viewport={"width": WIDTH, "height": height or 800}, color_scheme="light")
        page.goto(report(run).absolute().as_uri())
        page.screenshot(path=picture, full_page=height is None)
        launched.close()


if __name__ == "__main__":
    take_picture(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:4]))
