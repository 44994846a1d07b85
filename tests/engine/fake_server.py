"""Stands in for the API server process in tests of the supervisor: no torch, no vLLM, no port.

Argument: what it does. It maps the heartbeat page as the real one does, has a child of its own (an
"engine") and a segment of shared memory.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from multiprocessing import resource_tracker, shared_memory

from moet.base import env
from moet.base.errors import MachineError
from moet.engine.heartbeat import Page, Phase

deed = sys.argv[1]
page = Page.open(env.read().heartbeat)
memory = shared_memory.SharedMemory(create=True, size=4096)
if deed == "orphans":  # nobody unlinks the segment, and the child does not die with us
    resource_tracker.unregister("/" + memory.name, "shared_memory")
engine = subprocess.Popen(["sleep", "300"], start_new_session=True)
(env.read().cache_dir / f"made-{memory.name}").touch()
print("a line for the log", flush=True)

if deed == "fail":
    page.fail(MachineError("no room for the model", hint="buy memory"))
    sys.exit(2)
if deed == "exit":
    sys.exit(7)
if deed == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

page.rank(0).claim()
page.rank(0).loading(100, 100)
page.phase = Phase.PROBING if deed == "hang first" else Phase.READY
while True:
    if not deed.startswith("hang"):
        page.beat_loop()
    if deed == "die" and page.loop_beats > 10:
        page.fail(MachineError("the engine has died"))
        time.sleep(0.3)
        sys.exit(1)
    time.sleep(0.05)
