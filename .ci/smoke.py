"""Starts `moeserve serve` on the demo model, has one request answered, and stops it: `smoke.py PATH_OF_MOESERVE`."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request

LIMIT = 300


def main(moeserve: str) -> None:
    begin = time.monotonic()
    kv = tempfile.TemporaryDirectory()
    command = [moeserve, "serve", "--port", "0", "--kv-disk-path", kv.name]
    service = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        url = wait_for_url(service)
        print(f"ready after {time.monotonic() - begin:.1f} s")
        body = {"model": "demo", "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8}
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=LIMIT) as response:
            answer = json.load(response)
        print("answer:", answer["choices"][0]["message"]["content"])
        assert answer["usage"]["completion_tokens"] > 0
        service.send_signal(signal.SIGTERM)
        code = service.wait(timeout=60)
        assert code == 0, f"exit code {code}"
    finally:
        service.kill()
        service.wait()
        kv.cleanup()


def wait_for_url(service: subprocess.Popen[str]) -> str:
    assert service.stdout is not None
    for line in service.stdout:
        print(line, end="")
        if found := re.search(r"ready on (http://\S+)", line):
            return found[1]
    sys.exit("the service ended before it was ready")


if __name__ == "__main__":
    main(sys.argv[1])
