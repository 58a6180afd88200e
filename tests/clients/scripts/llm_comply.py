"""llm-comply: answers against the published schemas of chat completions, responses and messages."""

import json
import subprocess
import sys
from pathlib import Path

from client_checks import KEY, MODEL, V1, Checks

FORMATS = {"chat": "openai-chat", "responses": "open-responses", "messages": "anthropic"}
# The demo takes neither images nor other media, and says so.
UNSUPPORTED = ("image", "audio", "file")


def results_of(form):
    program = str(Path(sys.executable).parent / "llm-comply")
    command = [program, "--format", form, "-u", V1, "-k", KEY, "-m", MODEL, "--json", "--timeout", "120"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    try:
        said = json.loads(done.stdout[done.stdout.index("{") :])
    except ValueError:
        raise AssertionError(done.stdout[-1500:]) from None
    return said


for api, form in FORMATS.items():
    checks = Checks(api)
    print(json.dumps(results_of(form))[:6000], file=sys.stderr)
