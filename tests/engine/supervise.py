"""Starts servers whose API server is ``fake_server.py``; as a program: one server, until killed."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, cast

from moet.engine.heartbeat import Phase
from moet.engine.serve import Server
from moet.engine.serveplan import ServePlan

FAKE = (sys.executable, str(Path(__file__).with_name("fake_server.py")))


def plan(deed: str) -> ServePlan:
    return ServePlan(
        checkpoint=cast(Any, None),
        name="fake",
        url="http://127.0.0.1:1",
        api_key="",
        context=0,
        kv_bytes=None,
        expert_bytes=0,
        threads=1,
        isa="portable",
        arguments=(deed,),
    )


def ready(deed: str) -> Server:
    server = Server(plan(deed), command=FAKE)
    statuses = list(server.starting())
    assert statuses[-1].phase is Phase.READY
    assert (statuses[-1].loaded, statuses[-1].to_load) == (100, 100)
    return server


if __name__ == "__main__":
    server = ready(sys.argv[1])
    print("up", flush=True)
    time.sleep(60)
