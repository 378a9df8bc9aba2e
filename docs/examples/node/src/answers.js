/** Answers to clients: those of upstreams on their way through, and the gateway's own in the shape of OpenAI's errors. */
import * as grpc from "@grpc/grpc-js";
import { Readable } from "node:stream";
import { reasonOf } from "./service.js";

export class Answer {
  /**
   * @param {number} status
   * @param {import("node:http").OutgoingHttpHeaders} headers
   * @param {Readable} body
   */
  constructor(status, headers, body) {
    this.status = status;
    this.headers = headers;
    this.body = body;
  }

  /**
   * @param {number} status
   * @param {string} code
   * @param {string} type
   * @param {string} message
   * @param {number} [retryAfterMs] 0: unknown
   */
  static failure(status, code, type, message, retryAfterMs = 0) {
    const text = JSON.stringify({ error: { message, type, code } });
    /** @type {import("node:http").OutgoingHttpHeaders} */
    const headers = { "content-type": "application/json", "content-length": Buffer.byteLength(text) };
    if (retryAfterMs > 0) headers["retry-after"] = seconds(retryAfterMs);
    return new Answer(status, headers, Readable.from([text]));
  }
}

/** Rounded up: a client that comes back too early has waited for nothing. @param {number} ms */
export function seconds(ms) {
  return String(Math.ceil(ms / 1_000));
}

/** An error of the service as the client sees it. @param {any} error */
export function refused(error) {
  const reason = reasonOf(error);
  if (reason.startsWith("LEASE_")) {
    return Answer.failure(LEASE_STATUS[error.code] ?? 503, reason, "lease_error", error.details);
  }
  const { UNAUTHENTICATED, PERMISSION_DENIED, INVALID_ARGUMENT } = grpc.status;
  if ([UNAUTHENTICATED, PERMISSION_DENIED, INVALID_ARGUMENT].includes(error.code)) {
    return Answer.failure(500, "gateway_error", "server_error", "the gateway is not set up correctly");
  }
  return unavailable(reason.toLowerCase() || "policy_unavailable");
}

/** @param {string} code */
export function unavailable(code) {
  return Answer.failure(503, code, "service_unavailable", "no decision can be made now", 1_000);
}

/** HTTP form of the lease errors. @type {Record<number, number>} */
const LEASE_STATUS = {
  [grpc.status.INVALID_ARGUMENT]: 400,
  [grpc.status.UNAUTHENTICATED]: 401,
  [grpc.status.PERMISSION_DENIED]: 403,
  [grpc.status.FAILED_PRECONDITION]: 409,
};

/** Ends an answer that nobody gets. @param {Answer | undefined} answer */
export function discard(answer) {
  answer?.body.destroy();
}
