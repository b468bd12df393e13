"""A headless Chromium, driven by its DevTools protocol: it requires only the browser."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
LOADED = """new Promise(done => {
    const fonts = () => document.fonts.ready.then(() => requestAnimationFrame(() => done(true)))
    document.readyState === "complete" ? fonts() : addEventListener("load", fonts)
})"""


class Browser:
    """One tab; `with Browser(folder) as browser`, whose profile goes to `folder`."""

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        # The protocol is read from descriptor 3 and written to 4.
        options = "--headless=new --remote-debugging-pipe --no-sandbox --disable-gpu --no-first-run"
        options += f" --hide-scrollbars --disable-dev-shm-usage --user-data-dir={folder}"
        self._process = subprocess.Popen(
            ["bash", "-c", f"exec {CHROMIUM} {options} 3<&{to_read} 4>&{to_write}"],
            pass_fds=(to_read, to_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._buffer, self._number, self._session = b"", 0, None
        (page,) = [
            target
            for target in self._call("Target.getTargets")["targetInfos"]
            if target["type"] == "page"
        ][:1]
        attached = self._call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._to)
        self._process.terminate()
        self._process.wait(10)
        os.close(self._from)

    def show(self, url: str, width: int, dark: bool = False) -> None:
        """Load a page in a window of `width` pixels, and wait for its fonts and scripts."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call("Page.navigate", url=url)
        # The promise of a page that is being left is never kept: ask until the new one answers.
        while self.run("location.href") != url:
            pass
        self.run(LOADED)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, awaited if it is a promise."""
        answer = self._call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def screenshot(self, height: int = 2000) -> bytes:
        """The page from its top, up to `height` pixels, as PNG."""
        width, whole = self.run("[innerWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": width, "height": min(whole, height), "scale": 1}
        shot = self._call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        return base64.b64decode(shot["data"])

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._buffer:
                received = os.read(self._from, 1 << 16)
                assert received, f"Chromium ended during {method}"
                self._buffer += received
            text, _, self._buffer = self._buffer.partition(b"\0")
            answer = json.loads(text)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
