"""A real browser for the tests: Chromium, driven over a pair of pipes (DevTools messages, ended by zero bytes)."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: scripts/install_chromium.sh installs one")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe",
)  # fmt: skip
ON_3_AND_4 = """import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])"""

PATIENCE = 600
"""Seconds for what takes less than one: the machine may have much else to do."""


def _is_load(event, loader):
    params = event.get("params", {})
    return (event.get("method"), params.get("name"), params.get("loaderId")) == ("Page.lifecycleEvent", "load", loader)


class Tab:
    """One tab of a browser and everything that it has reported."""

    def __init__(self, to_browser, from_browser):
        self.to_browser, self.from_browser = to_browser, from_browser
        self.pending, self.events, self.calls, self.session = b"", [], 0, None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Page.setLifecycleEventsEnabled", enabled=True)

    def call(self, method, **params):
        self.calls += 1
        message = {"id": self.calls, "method": method, "params": params}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self.to_browser, json.dumps(message).encode() + b"\0")
        while (answer := self.read()).get("id") != self.calls:
            self.events.append(answer)
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def read(self):
        while b"\0" not in self.pending:
            ready, _, _ = select.select([self.from_browser], [], [], PATIENCE)
            assert ready, f"the browser did not answer for {PATIENCE} seconds"
            chunk = os.read(self.from_browser, 1 << 20)
            assert chunk, "the browser is gone"
            self.pending += chunk
        message, _, self.pending = self.pending.partition(b"\0")
        return json.loads(message)

    def open(self, page, width, *, phone=False, scheme="light", media="screen"):
        """Load a page, by its path or its address, at that width in CSS pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=phone)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)
        self.events.clear()
        loader = self.call("Page.navigate", url=page if isinstance(page, str) else page.as_uri())["loaderId"]
        while not any(_is_load(event, loader) for event in self.events):  # of this page, not of the one before
            self.events.append(self.read())

    def evaluate(self, expression):
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, path):
        """What a reader sees of the page now, as a PNG file; its bytes."""
        image = base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
        path.write_bytes(image)
        return image

    def wait_for(self, expression, seconds=PATIENCE):
        """Until an expression is true."""
        deadline = time.monotonic() + seconds
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, f"still not true after {seconds} seconds: {expression}"
            time.sleep(0.1)

    def complaints(self):
        """Whatever a reader would see in the console: exceptions, errors, warnings, blocked or failed loads."""
        self.evaluate("new Promise(done => setTimeout(done, 100))")
        wrong = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded", "Network.loadingFailed")
        return [event for event in self.events if event.get("method") in wrong]

    def requests(self):
        """The addresses that were asked for, other than data within the page."""
        sent = [event["params"] for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [url for url in (params["request"]["url"] for params in sent) if not url.startswith("data:")]


@contextmanager
def chromium(profile):
    """A tab of a new headless browser, which ends with the block."""
    (its_in, our_out), (our_in, its_out) = os.pipe(), os.pipe()
    # Out of the way of 3 and 4, where the browser looks for its ends of the pipes.
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (its_in, its_out)]
    command = [sys.executable, "-c", ON_3_AND_4, *map(str, ends), CHROMIUM, *FLAGS, f"--user-data-dir={profile}"]
    with (profile / "log").open("wb") as log:
        process = subprocess.Popen(command, pass_fds=ends, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    for end in (its_in, its_out, *ends):
        os.close(end)
    try:
        yield Tab(our_out, our_in)
    finally:
        os.close(our_out)  # the browser ends when nobody can talk to it any more
        os.close(our_in)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
