"""Headless browser driven through chromedriver's protocol, JSON over HTTP, without further packages."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MISSING = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
_ARGUMENTS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
    "--hide-scrollbars", "--window-size=1200,900",
)  # fmt: skip
_PATIENCE = 180.0  # seconds


class Browser:
    """Browser with a single tab."""

    def __init__(self, address: str, profile: Path):
        options = {"binary": shutil.which("chromium"), "args": [*_ARGUMENTS, f"--user-data-dir={profile}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self._address = address
        made = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._address = f"{address}/session/{made['sessionId']}"

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._address + path, data=data, method=method, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=_PATIENCE) as answer:
            return json.load(answer)["value"]

    def open(self, page: Path) -> None:
        self._ask("POST", "/url", {"url": page.resolve().as_uri()})

    def run(self, script: str, *arguments: Any) -> Any:
        """Run the body of a function and return its result."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def devtools(self, command: str, **parameters: Any) -> Any:
        return self._ask("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def errors(self) -> list[str]:
        """Return the errors and warnings in the console since the last call."""
        found = self._ask("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in found if entry["level"] in ("SEVERE", "WARNING")]

    def width(self, width: int, *, height: int = 900) -> None:
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def prefers(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.devtools("Emulation.setEmulatedMedia", features=features)

    def wait(self, script: str, *arguments: Any) -> Any:
        """Run a script until it returns a true value, and return that."""
        deadline = time.monotonic() + _PATIENCE
        while not (found := self.run(script, *arguments)):
            assert time.monotonic() < deadline, f"never true: {script}"
            time.sleep(0.05)
        return found

    def close(self) -> None:
        self._ask("DELETE", "")


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Start a browser with an empty profile, and end it."""
    driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True)
    try:
        assert driver.stdout is not None
        said = next(line for line in driver.stdout if "successfully on port" in line)
        port = said.rstrip(".\n").rsplit(" ", 1)[1]
        made = Browser(f"http://127.0.0.1:{port}", profile)
        try:
            yield made
        finally:
            made.close()
    finally:
        driver.terminate()
        driver.communicate(timeout=_PATIENCE)
