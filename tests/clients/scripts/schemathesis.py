"""schemathesis on /openapi.json: no operation may end in a server error. EXAMPLES: cases of each operation."""

import os
import subprocess
import sys
from pathlib import Path

from client_checks import URL, Checks

EXAMPLES = os.environ.get("EXAMPLES", "100")


@Checks("openapi")
def no_server_error():
    command = [str(Path(sys.executable).parent / "schemathesis"), "run", f"{URL}/openapi.json", "--url", URL]
    options = ["--checks", "not_a_server_error", "--max-examples", EXAMPLES, "--phases", "examples,coverage,fuzzing"]
    options += ["--header", f"Authorization: Bearer {os.environ['ADMIN_KEY']}", "--no-color", "--continue-on-failure"]
    # One stream of events has no end. A service that sleeps answers 503 to commands of the cache.
    options += ["--exclude-path", "/v1/stats/stream", "--exclude-path", "/sleep", "--seed", "1"]
    done = subprocess.run(
        [*command, *options, "--suppress-health-check", "all", "--request-timeout", "120"],
        env={**os.environ, "SCHEMATHESIS_HOOKS": "short_answers"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    Path("schemathesis.log").write_text(done.stdout)
    assert done.returncode == 0, done.stdout[-1500:]
    return done.stdout[-300:]
