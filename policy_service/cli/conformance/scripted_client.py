"""Scripted client: sends one OpenAI-shaped request to the gateway under test, reads as it arrives, hangs up as told."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from policy_service.cli.conformance.cases import ClientScript
from policy_service.cli.conformance.http_text import encode_head, read_body, read_head
from policy_service.cli.conformance.record import ClientExchange
from policy_service.settings.server import split_address

PATH: Final = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class GatewayAccess:
    """How clients reach the gateway under test.

    Args:
        address: host:port.
        path: where completions are posted.
        model: what the client asks for; a gateway may make it a route.
        key: bearer key of the client.
        headers: sent with every request.
    """

    address: str
    path: str = PATH
    model: str = "conformance"
    key: str = "client-key-of-the-conformance-kit"
    headers: Mapping[str, str] | None = None


async def exchange(access: GatewayAccess, script: ClientScript, message: str) -> ClientExchange:
    """Send a request and keep what comes back.

    Args:
        message: text of the one user message.
    """
    found = ClientExchange(time.monotonic())
    talk = asyncio.create_task(_talk(access, script, message, found))
    limit_ms = script.leave_after_ms if script.leave_after_ms is not None else script.patience_ms
    done, _ = await asyncio.wait({talk}, timeout=limit_ms / 1000)
    if not done:
        found.left = True
        found.problem = "the client left" if script.leave_after_ms is not None else f"no end within {limit_ms} ms"
        talk.cancel()
    await asyncio.gather(talk, return_exceptions=True)
    found.ended_at = time.monotonic()
    return found


async def _talk(access: GatewayAccess, script: ClientScript, message: str, found: ClientExchange) -> None:
    host, port = split_address(access.address)
    writer: asyncio.StreamWriter | None = None
    try:
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(_request(access, script, message))
        await _read(reader, script, found)
    except (OSError, ValueError, asyncio.IncompleteReadError) as error:
        found.problem = f"the answer broke off: {type(error).__name__}"
    finally:
        if writer is not None:
            with suppress(OSError):
                writer.transport.abort()


def _request(access: GatewayAccess, script: ClientScript, message: str) -> bytes:
    fields = {"model": access.model, "messages": [{"role": "user", "content": message}], "stream": script.stream}
    body = json.dumps(fields | dict(script.body)).encode()
    headers = {
        "host": access.address,
        "content-type": "application/json",
        "authorization": f"Bearer {access.key}",
        "connection": "close",
        **(access.headers or {}),
        **script.headers,
        "content-length": str(len(body)),
    }
    return encode_head(f"POST {access.path} HTTP/1.1", list(headers.items())) + body


async def _read(reader: asyncio.StreamReader, script: ClientScript, found: ClientExchange) -> None:
    head = await read_head(reader)
    found.status, found.headers = int(head.start.split(" ")[1]), head.headers
    async for piece in read_body(reader, head, until_end=True):
        found.body += piece
        found.arrivals.append(time.monotonic())
        if script.leave_after_events is not None and found.body.count(b"\n\n") >= script.leave_after_events:
            found.left, found.problem = True, "the client left"
            return
