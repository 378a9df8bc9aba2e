"""Accounts of a make-believe provider, for trying a gateway out: each listens on a port and answers as it is told.

    python docs/examples/upstream.py 127.0.0.1:9101=429 127.0.0.1:9102=200

429 says `retry-after: 60`. A 200 names the account; with `"stream": true` in the request it comes as events. One line
says that all of them listen; Ctrl-C ends them.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
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
    found = re.fullmatch(r"([^:=]+):(\d{1,5})=([2-5]\d\d)", text)
    if found is None or int(found[2]) > 65_535:
        form = "write host:port=status, such as 127.0.0.1:9101=429"
        raise argparse.ArgumentTypeError(f"{text!r} is not an address; {form}")
    return found[1], int(found[2]), int(found[3])


def listening(host: str, port: int, status: int) -> ThreadingHTTPServer:
    """The server of one account; ends the program where it cannot listen."""
    try:
        return ThreadingHTTPServer((host, port), handler(f"port {port}", status))
    except OSError as error:
        sys.exit(f"upstream: {host}:{port}: {error.strerror}: end what listens there, or name another port")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("accounts", nargs="+", type=account, metavar="HOST:PORT=STATUS")
    accounts = parser.parse_args().accounts
    for server in [listening(*each) for each in accounts]:
        Thread(target=server.serve_forever, daemon=True).start()
    print("listening:", ", ".join(f"{host}:{port} answers {status}" for host, port, status in accounts), flush=True)
    with suppress(KeyboardInterrupt):
        Event().wait()
