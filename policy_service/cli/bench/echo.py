"""The bare echo: parses the same request, answers with a copy of an answer of the real service, decides nothing.

A process of its own, on the same event loop implementation as the service: `python -m policy_service.cli.bench.echo`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
from base64 import b64decode, b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import grpc
import uvloop

from policy_service.cli.bench.cases import Case
from policy_service.generated.policy.v1 import policy_pb2

SERVICE: Final = "policy.bench.v1.EchoServer"


def echo_path(case: Case) -> str:
    """Path of a case on the echo."""
    return f"/{SERVICE}/{case.name}"


def write_script(path: Path, cases: tuple[Case, ...], answers: Mapping[str, bytes]) -> None:
    """Write what the echo answers to each case."""
    script = {case.name: [*(m.DESCRIPTOR.name for m in case.messages()), _text(answers[case.name])] for case in cases}
    path.write_text(json.dumps(script), encoding="utf-8")


def _text(data: bytes) -> str:
    return b64encode(data).decode()


def _handler(request_name: str, answer_name: str, answer: str) -> Any:
    request, response = getattr(policy_pb2, request_name), getattr(policy_pb2, answer_name)
    recorded = response.FromString(b64decode(answer))

    async def handle(message: Any, context: Any) -> Any:
        copy = response()
        copy.CopyFrom(recorded)
        return copy

    return grpc.unary_unary_rpc_method_handler(handle, request.FromString, response.SerializeToString)


async def _serve(address: str, script: Mapping[str, list[str]]) -> None:
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    handlers = {name: _handler(*entry) for name, entry in script.items()}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    server.add_insecure_port(address)
    await server.start()
    await ended.wait()
    await server.stop(None)


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", help="host:port")
    parser.add_argument("script", type=Path, help="file by `write_script`")
    given = parser.parse_args()
    uvloop.run(_serve(given.address, json.loads(given.script.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
