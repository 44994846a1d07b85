"""Stands in for `moet serve` in tests of the memory bench: memory as told, answers of nothing.

Its folder is a checkpoint; it takes as many bytes as the experts have in it, times a factor. A
negative factor: it does not start.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from moet.checkpoint import open_checkpoint

factor, folder = float(sys.argv[1]), Path(sys.argv[2])
flags = dict(zip(sys.argv[4::2], sys.argv[5::2], strict=True))
if factor < 0:
    sys.exit("error: no room\nhint: buy memory")
key = os.environ["MOET_API_KEY"]
taken = b"x" * int(factor * open_checkpoint(folder).expert_bytes)


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        allowed = self.headers["authorization"] == f"Bearer {key}"
        fits = len(asked["prompt"]) + asked["max_tokens"] <= int(flags["--max-model-len"])
        body = json.dumps({"choices": [{"text": "x" * asked["max_tokens"]}]}).encode()
        self.send_response(200 if allowed and fits else 400)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return


server = HTTPServer(("127.0.0.1", int(flags["--port"])), Handler)
signal.signal(signal.SIGINT, lambda *_: threading.Thread(target=server.shutdown).start())
print(json.dumps({"url": f"http://127.0.0.1:{server.server_port}", "model": "m"}), flush=True)
server.serve_forever()
