"""Stands in for the model process: beats, reports, and misbehaves as STANDIN_WORKER says."""

import argparse
import os
import signal
import subprocess
import sys

import msgspec
import zmq

from launcher.processes import reporter
from moeserve.run_context import load_run_context
from moeserve.statuses import Failed, Loading, Ready
from moeserve.wire import Heartbeat, encode

READY = Ready(
    device="cpu",
    dtype="float32",
    weights_bytes=2**20,
    kv_bytes=2**20,
    num_blocks=100,
    block_size=16,
    max_model_len=1000,
    model_max_len=4000,
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("context")
    parser.add_argument("--status-fd", type=int)
    arguments = parser.parse_args()
    manner = os.environ.get("STANDIN_WORKER", "")
    context = load_run_context(arguments.context)
    # Taken by a wait for it: a handler that sets an event for which its own thread waits may find the event locked.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    with open(arguments.status_fd, "w") as pipe:
        report = reporter(pipe)
        if manner == "refuses":
            report(Failed("The model is too big for this machine."))
            sys.exit(3)
        if manner == "loads for ever" or (manner == "loads for ever again" and context.incarnation > 7):
            report(Loading(1, 2))
            signal.pause()
        with zmq.Context() as zmq_context, zmq_context.socket(zmq.PUB) as heartbeats:
            heartbeats.bind(context.heartbeat_address)
            rank = subprocess.Popen(["sleep", "60"]) if manner == "is an agent" else None
            report(READY if rank is None else msgspec.structs.replace(READY, pid=rank.pid))
            turn = 0
            while signal.sigtimedwait([signal.SIGTERM], 0.05) is None:
                if manner == "crashes":
                    os._exit(7)
                turn += manner not in ("hangs", "wedges idle")
                beat = Heartbeat(os.getpid(), turn, manner != "wedges idle")
                heartbeats.send(encode(beat, context.incarnation))
            if rank is not None:
                rank.kill()


main()
