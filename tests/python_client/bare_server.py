"""A gRPC server that stands for the service where only the transport matters, and the faults that it can have."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import grpc

from policy_client import messages
from policy_client.connection import HEALTH_METHOD, HEALTH_SERVING, REPORT, SELECT
from policy_client.testing import target

SLOW_S = 0.1


class Bare:
    """Answers every selection with the same Dispatch, until it is lost."""

    def __init__(self, port: int) -> None:
        self._goes_on = Event()
        self._goes_on.set()
        self._slow_s = 0.0
        self.address = f"127.0.0.1:{port}"
        self._server = self._serving(port)

    def lose(self, how: str) -> None:
        """`killed`, `hung`, or not at all: only `slow`."""
        if how == "killed":
            self._server.stop(None).wait()
        elif how == "hung":
            self._goes_on.clear()
        else:
            self._slow_s = SLOW_S

    def end(self) -> None:
        """Let go whoever hangs."""
        self._goes_on.set()
        self._server.stop(None).wait()

    def _serving(self, port: int) -> grpc.Server:
        server = grpc.server(ThreadPoolExecutor(8), handlers=(self._handler(),))
        server.add_insecure_port(f"127.0.0.1:{port}")
        server.start()
        return server

    def _answer(self, path: str, answer: bytes) -> bytes:
        self._goes_on.wait(30)
        if path == SELECT.path:
            time.sleep(self._slow_s)  # a fault of a real server, not a wait of the test
        return answer

    def _handler(self) -> grpc.GenericRpcHandler:
        dispatch = messages.Dispatch(target=target("openai/main/gpt"), fallbacks=[target("openai/spare/gpt")])
        selected = messages.SelectTargetResponse(decision_token=b"t", dispatch=dispatch)
        answers = {
            SELECT.path: selected.SerializeToString(), REPORT.path: b"", HEALTH_METHOD: HEALTH_SERVING,
        }  # fmt: skip
        method = grpc.unary_unary_rpc_method_handler

        class Answers(grpc.GenericRpcHandler):  # type: ignore[misc]
            def service(_, details: Any) -> Any:  # noqa: N805
                return method(lambda request, context: self._answer(details.method, answers[details.method]))

        return Answers()
