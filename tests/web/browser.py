"""A real browser for tests: chromium without a window, driven over its own pipe, so that no driver has to be installed."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Self

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MISSING = "chromium is not installed: apt-get install chromium"
SWITCHES = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--disable-extensions", "--disable-default-apps", "--mute-audio", "--hide-scrollbars", "--allow-file-access-from-files=false",
    "--disable-dev-shm-usage", "--remote-debugging-pipe",
]  # fmt: skip


class Browser:
    """One tab. Use as a context manager."""

    def __init__(self) -> None:
        assert CHROMIUM
        self._profile = tempfile.mkdtemp(prefix="etude-browser-")
        (ours_in, theirs_out), (theirs_in, ours_out) = os.pipe(), os.pipe()
        arrange = 'exec 3<&"$0" 4>&"$1"; shift; exec "$@"'  # where chromium looks for its pipe
        command = [
            "bash",
            "-c",
            arrange,
            str(theirs_in),
            str(theirs_out),
            CHROMIUM,
            *SWITCHES,
            f"--user-data-dir={self._profile}",
            "about:blank",
        ]
        self._process = subprocess.Popen(
            command,
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._out, self._in, self._left = ours_out, ours_in, bytearray()
        self._number, self._session = 0, ""
        self.complaints: list[str] = []  # errors of scripts, and what the policy refused
        self._events: list[str] = []
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._send(f"{domain}.enable")
        self.size(1280, 900)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
        shutil.rmtree(self._profile, ignore_errors=True)

    def _send(self, method: str, **given: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": given} | (
            {"sessionId": self._session} if self._session else {}
        )
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return dict(answer["result"])

    def _read(self) -> dict[str, Any]:
        """Return the next message; what the page complains of is kept."""
        while (end := self._left.find(b"\0")) < 0:
            piece = os.read(self._in, 1 << 16)
            assert piece, "the browser has gone"
            self._left += piece
        message = dict(json.loads(self._left[:end]))
        del self._left[: end + 1]
        given = message.get("params", {})
        if message.get("method") == "Log.entryAdded" and given["entry"]["level"] == "error":
            self.complaints.append(f"{given['entry']['text']} {given['entry'].get('url', '')}")
        if message.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(
                str(given["exceptionDetails"].get("exception", {}).get("description", given["exceptionDetails"]))
            )
        if "method" in message:
            self._events.append(message["method"])
        return message

    def open(self, address: str) -> None:
        """Go to an address, and wait until it is loaded."""
        self._events.clear()
        self._send("Page.navigate", url=address)
        while "Page.loadEventFired" not in self._events:
            self._read()

    def ask(self, script: str) -> Any:
        """Return the value of a script; of a promise, what it comes to."""
        result = self._send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, condition: str, seconds: float = 20) -> None:
        """Wait until a condition holds on the page."""
        script = (
            f"new Promise((done, fail) => {{ const end = Date.now() + {1000 * seconds}; const look = () => {{ let holds = false; "
            f"try {{ holds = {condition}; }} catch {{}} if (holds) done(true); else if (Date.now() > end) done(false); else setTimeout(look, 20); }}; look(); }})"
        )
        assert self.ask(script), f"it never came to: {condition}\n{self.ask('document.body.innerText')[:2000]}"

    def click(self, selector: str) -> None:
        """Click on what a selector finds, and wait for the page that this leads to."""
        self._events.clear()
        self.ask(
            f"document.querySelector({json.dumps(selector)}).dispatchEvent(new MouseEvent('click', {{bubbles: true, cancelable: true}}))"
        )
        while "Page.loadEventFired" not in self._events:
            self._read()

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self._send(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode={"Tab": 9, "ArrowRight": 39, "Enter": 13}[key],
            )

    def text(self, selector: str = "body") -> str:
        return str(self.ask(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def size(self, wide: int, high: int, *, dark: bool = False) -> None:
        self._send(
            "Emulation.setDeviceMetricsOverride", width=wide, height=high, deviceScaleFactor=1, mobile=wide < 600
        )
        self._send(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """Write what is seen as PNG."""
        taken = self._send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(taken["data"]))
