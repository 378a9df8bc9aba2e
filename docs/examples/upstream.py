"""Accounts of a make-believe provider, for trying a gateway out: each listens on a port and answers as it is told.

    python docs/examples/upstream.py 127.0.0.1:9101=429 127.0.0.1:9102=200

429 says `retry-after: 60`. A 200 names the account; with `"stream": true` in the request it comes as events.
"""

from __future__ import annotations

import argparse
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


def handler(name: str, status: int) -> type[BaseHTTPRequestHandler]:
    """What answers the calls of one account."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])) or b"{}")
            streamed = bool(body.get("stream")) and status == 200
            text = events(name) if streamed else json.dumps(answer(name, status, body.get("model", ""))) + "\n"
            self.send_response(status)
            self.send_header("content-type", "text/event-stream" if streamed else "application/json")
            self.send_header("content-length", str(len(text)))
            if status == 429:
                self.send_header("retry-after", "60")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            """Says nothing."""

    return Handler


def answer(name: str, status: int, model: str) -> dict[str, Any]:
    """The body of an answer."""
    if status == 200:
        return {"model": model, "choices": [{"message": {"role": "assistant", "content": f"hello from {name}"}}]}
    return {"error": {"message": f"{name} says {status}", "type": "server_error"}}


def events(name: str) -> str:
    """The body of a streamed answer."""
    words = [{"choices": [{"delta": {"content": word}}]} for word in ("hello ", "from ", name)]
    return "".join(f"data: {json.dumps(word)}\n\n" for word in words) + "data: [DONE]\n\n"


def account(text: str) -> tuple[str, int, int]:
    """`host:port=status` as its parts."""
    address, _, status = text.partition("=")
    host, _, port = address.rpartition(":")
    return host, int(port), int(status)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("accounts", nargs="+", type=account, metavar="HOST:PORT=STATUS")
    for host, port, status in parser.parse_args().accounts:
        server = ThreadingHTTPServer((host, port), handler(f"port {port}", status))
        Thread(target=server.serve_forever).start()
