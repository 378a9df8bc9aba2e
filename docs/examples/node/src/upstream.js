/** Calls to upstreams, and what came back. */
import { Readable } from "node:stream";
import { LocalFaultKind, NetworkErrorKind } from "../gen/policy/v1/policy_pb.js";
import { Answer, seconds } from "./answers.js";
import { endToEnd, send } from "./request.js";
import { EventScanner, hidesFailure } from "./stream.js";

/** @import { IncomingMessage } from "node:http" */
/** @import { Verdict } from "../gen/policy/v1/policy_pb.js" */
/** @import { Degradation, Header, Target } from "../gen/policy/v1/types_pb.js" */
/** @import { Journey } from "./journey.js" */

/** As much of an answer as is looked at before it goes to the client, and as much as a report may carry. */
export const MAX_HEAD_BYTES = 64 * 1024;

/**
 * What a decision says about a call besides its target: a timeout (0: the gateway's own), headers to set and to drop, changes
 * to the request.
 *
 * @typedef {{timeoutMs: number, set: Header[], strip: string[], degradations: Degradation[]}} Wishes
 */

/** Why a timer of the gateway ended a call. @typedef {"no_answer" | "idle" | "out_of_time"} Cause */

/** What one upstream call brought. */
export class Result {
  /** @type {IncomingMessage | undefined} */
  response;
  /** @type {AsyncIterator<Buffer> | undefined} the rest of its body */
  rest;
  head = Buffer.alloc(0);
  isStream = false;
  failed = true;
  /** @type {Buffer | undefined} error event met in a stream */
  streamError;
  cancelled = false;
  localFault = LocalFaultKind.UNSPECIFIED;
  missing = ""; // the upstream that the configuration lacks
  /** @type {Error | undefined} the network failed, before or after the response began */
  broken;
  networkError = NetworkErrorKind.UNSPECIFIED;
  sent = performance.now();
  firstByteMs = 0;
  tookMs = 0;
  bytes = 0;
  isWhole = false; // its body has come to its end
  /** @type {Cause | undefined} */
  cause;
  controller = new AbortController();

  /**
   * @param {number} idleMs longest silence in the body
   * @param {AbortSignal} [client] is aborted when the client leaves
   */
  constructor(idleMs = 0, client) {
    this.idleMs = idleMs;
    this.client = client;
  }

  /** There is no such upstream. @param {string} missing */
  static uncalled(missing) {
    const result = new Result();
    result.localFault = LocalFaultKind.EXECUTION;
    result.missing = missing;
    return result;
  }

  get status() {
    return this.response?.statusCode ?? 0;
  }

  /** Another account may do better. Asked only while the service is away. */
  get isWorthAnother() {
    if (!this.response || this.broken) return this.localFault !== LocalFaultKind.OWN_TIMEOUT;
    return [200, 401, 402, 403, 404, 408, 429].includes(this.status) || this.status >= 500;
  }

  /** Ends the call, now or after so long. @param {Cause} cause @param {number} ms */
  endAfter(cause, ms) {
    return setTimeout(() => {
      this.cause = cause;
      this.controller.abort();
    }, ms);
  }

  close() {
    this.controller.abort();
    this.response?.destroy();
  }

  /**
   * Reads the head of the answer: of a stream the first event, of anything else as much as fits.
   *
   * @param {IncomingMessage} response
   */
  async begin(response) {
    this.response = response;
    this.firstByteMs = performance.now() - this.sent;
    this.isStream = (response.headers["content-type"] ?? "").startsWith("text/event-stream");
    this.rest = response[Symbol.asyncIterator]();
    const events = new EventScanner();
    let isWhole = false;
    while (!isWhole && this.head.length < MAX_HEAD_BYTES && !(this.isStream && events.seen > 0)) {
      const { value, done } = await this.rest.next();
      isWhole = Boolean(done);
      if (!value) continue;
      this.head = Buffer.concat([this.head, value]);
      events.write(value);
    }
    this.streamError = this.isStream ? events.failure : undefined;
    const isSuccess = this.status >= 200 && this.status < 300;
    this.failed = !isSuccess || Boolean(this.streamError) || (isWhole && hidesFailure(this.head, this.isStream));
    this.tookMs = performance.now() - this.sent;
  }

  /** Notes a network failure, or the end that a timer of the gateway made. @param {any} error */
  fail(error) {
    this.tookMs = performance.now() - this.sent;
    this.failed = true;
    this.broken = error;
    this.networkError = networkErrorOf(this, error);
    if (this.cause === "out_of_time") this.localFault = LocalFaultKind.OWN_TIMEOUT;
    this.close();
  }

  /**
   * Hands a success to the client; `finish` is called once, when its body has ended in whatever way.
   *
   * @param {(ended: Result) => void} finish
   */
  stream(finish) {
    const events = new EventScanner();
    const body = Readable.from(this.watched(events), { objectMode: false });
    body.once("close", () => {
      this.tookMs = performance.now() - this.sent;
      this.streamError = events.failure;
      this.cancelled = !this.isWhole && !this.broken; // the client has left: nobody reads on
      finish(this);
    });
    return this.answer(body);
  }

  /** @param {EventScanner} events */
  async *watched(events) {
    try {
      for await (const chunk of this.chunks()) {
        this.bytes += chunk.length;
        if (this.isStream) events.write(chunk);
        yield chunk;
      }
      this.isWhole = true;
    } catch (error) {
      if (!this.client?.aborted) this.fail(error);
      throw error;
    }
  }

  /** Head and rest. Silence ends it; a client that reads slowly does not. */
  async *chunks() {
    if (this.head.length > 0) yield this.head;
    for (;;) {
      const timer = this.endAfter("idle", this.idleMs);
      const { value, done } = await /** @type {AsyncIterator<Buffer>} */ (this.rest).next().finally(() => clearTimeout(timer));
      if (done) return;
      yield value;
    }
  }

  /**
   * A failure as the client gets it: with the status that the service has put right, and its Retry-After.
   *
   * @param {Verdict | undefined} verdict
   */
  forClient(verdict) {
    if (this.missing) {
      const message = `the configuration of the gateway has no upstream ${this.missing}`;
      return Answer.failure(502, "upstream_not_configured", "server_error", message);
    }
    if (this.localFault === LocalFaultKind.OWN_TIMEOUT) {
      return Answer.failure(504, "timeout", "server_error", "no answer in time");
    }
    if (!this.response || this.broken) {
      return Answer.failure(502, "upstream_unreachable", "server_error", "the upstream gave no usable answer");
    }
    const answer = this.answer(Readable.from(this.chunks(), { objectMode: false }));
    answer.status = verdict?.restatedStatus ?? answer.status;
    if (verdict?.retryAfterMs) answer.headers["retry-after"] = seconds(Number(verdict.retryAfterMs));
    return answer;
  }

  /** The upstream call ends with the body, also where nobody has begun to read it. @param {Readable} body */
  answer(body) {
    body.once("close", () => this.close());
    return new Answer(this.status, endToEnd(this.response?.headers ?? {}), body);
  }
}

/**
 * Makes one upstream call and reads the beginning of the answer: an error hidden in a 200 is still a failure while nothing of
 * it has reached the client.
 *
 * @param {Journey} journey
 * @param {Target} target
 * @param {Wishes} wishes
 */
export async function call(journey, target, wishes) {
  journey.attempts += 1;
  const { config } = journey.gateway;
  const key = `${target.provider}/${target.connection}`;
  const upstream = config.upstreams[key];
  if (!upstream) {
    journey.gateway.log(`no upstream ${key} in ${config.path}: add it`, {});
    return Result.uncalled(key);
  }
  const result = new Result(config.idle_timeout_ms, journey.signal);
  const limit = Math.min(config.first_byte_timeout_ms, wishes.timeoutMs || Infinity);
  const timer =
    journey.leftMs < limit ? result.endAfter("out_of_time", journey.leftMs) : result.endAfter("no_answer", limit);
  const signal = AbortSignal.any([journey.signal, result.controller.signal]);
  try {
    await result.begin(await send(journey.request, target, upstream, wishes, signal));
  } catch (error) {
    result.fail(error);
  } finally {
    clearTimeout(timer);
  }
  return result;
}

/** @type {Record<string, NetworkErrorKind>} */
const BY_CODE = {
  ENOTFOUND: NetworkErrorKind.DNS,
  EAI_AGAIN: NetworkErrorKind.DNS,
  ECONNREFUSED: NetworkErrorKind.CONNECT_REFUSED,
  ETIMEDOUT: NetworkErrorKind.CONNECT_TIMEOUT,
  ECONNRESET: NetworkErrorKind.CONNECTION_RESET,
  EPIPE: NetworkErrorKind.CONNECTION_RESET,
  ECONNABORTED: NetworkErrorKind.CONNECTION_RESET,
};

/** Names a failure of the network as the contract does. @param {Result} result @param {any} error */
function networkErrorOf({ cause, response, isStream }, error) {
  const inStream = response && isStream;
  if (cause === "idle") return inStream ? NetworkErrorKind.STREAM_IDLE_TIMEOUT : NetworkErrorKind.READ_TIMEOUT;
  if (cause) return inStream ? NetworkErrorKind.STREAM_READINESS_TIMEOUT : NetworkErrorKind.READ_TIMEOUT;
  if (inStream) return NetworkErrorKind.STREAM_EARLY_EOF;
  const code = String(error.code ?? "");
  if (/^HPE_/.test(code)) return NetworkErrorKind.PROTOCOL_ERROR;
  if (/CERT|TLS|SSL/.test(code)) return NetworkErrorKind.TLS;
  return BY_CODE[code] ?? NetworkErrorKind.UNSPECIFIED;
}
