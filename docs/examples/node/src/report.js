/** Attempts as the service wants to hear of them. */
import { LocalFaultKind, NetworkErrorKind, Origin } from "../gen/policy/v1/policy_pb.js";
import { MAX_HEAD_BYTES } from "./upstream.js";

/** @import { MessageInitShape } from "@bufbuild/protobuf" */
/** @import { ReportOutcomeRequestSchema, Verdict } from "../gen/policy/v1/policy_pb.js" */
/** @import { Target } from "../gen/policy/v1/types_pb.js" */
/** @import { Attempt } from "./attempt.js" */
/** @import { Result } from "./upstream.js" */

/**
 * Bodies travel for failures only.
 *
 * @param {Attempt} attempt
 * @param {Result} result
 * @param {boolean} isFinal true: frees the permits of the decision
 * @returns {MessageInitShape<typeof ReportOutcomeRequestSchema>}
 */
export function reportOf(attempt, result, isFinal) {
  return {
    decisionToken: attempt.held.token,
    attempt: attempt.number,
    target: attempt.target,
    attemptOffsetMs: whole(attempt.offsetMs),
    final: isFinal,
    latencyMs: whole(result.tookMs),
    firstByteMs: result.response ? whole(result.firstByteMs) : undefined,
    streamed: result.isStream,
    bytesStreamed: BigInt(result.bytes),
    headers: headersOf(result),
    ...outcomeOf(result),
  };
}

/** @param {Result} result @returns {MessageInitShape<typeof ReportOutcomeRequestSchema>} */
function outcomeOf(result) {
  if (result.cancelled) return { outcome: { case: "clientCancelled", value: {} }, origin: Origin.CLIENT };
  if (result.localFault) {
    return { outcome: { case: "localFault", value: { kind: result.localFault } }, origin: Origin.GATEWAY };
  }
  if (result.broken) {
    const outcome = { case: /** @type {const} */ ("networkError"), value: result.networkError };
    return { outcome, networkErrorText: result.broken.message, origin: Origin.TRANSPORT };
  }
  return {
    outcome: { case: "httpStatus", value: result.status },
    origin: Origin.UPSTREAM,
    body: result.failed && !result.streamError ? result.head.subarray(0, MAX_HEAD_BYTES) : undefined,
    details: result.streamError ? { streamError: result.streamError } : undefined,
  };
}

/** @param {Result} result */
function headersOf({ response }) {
  const raw = response?.rawHeaders ?? [];
  const pairs = raw.flatMap((name, place) => (place % 2 ? [] : [{ name, value: raw[place + 1] }]));
  return pairs.filter(({ name }) => name.toLowerCase() !== "set-cookie");
}

/** @param {number} ms */
function whole(ms) {
  return BigInt(Math.round(ms));
}

/**
 * What the next SelectTarget of this client request is told about a failure.
 *
 * @param {Target} target
 * @param {Result} result
 * @param {Verdict | undefined} verdict
 */
export function earlierAttempt(target, result, verdict) {
  return {
    target,
    httpStatus: result.response && !result.broken ? result.status : undefined,
    reason: verdict?.reasonText,
    scope: verdict?.scopeText,
    kind: verdict?.failureKindText,
    retryHintMs: verdict?.retryAfterMs,
  };
}

/** The outcome in a word, for the log. @param {Result} result */
export function textOf(result) {
  if (result.missing) return `no upstream ${result.missing}`;
  if (result.localFault) return LocalFaultKind[result.localFault];
  if (result.broken) return NetworkErrorKind[result.networkError];
  return result.streamError ? "error in a stream" : String(result.status);
}

/** @param {Target} target */
export function nameOf(target) {
  return `${target.provider}/${target.connection}/${target.model}`;
}
