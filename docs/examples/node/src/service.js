/** The gateway's connection to the policy service, and what its errors mean. */
import { readFileSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";
import * as grpc from "@grpc/grpc-js";
import { create, fromBinary, toBinary } from "@bufbuild/protobuf";
import { anyUnpack } from "@bufbuild/protobuf/wkt";
import { ErrorInfoSchema } from "../gen/google/rpc/error_details_pb.js";
import { StatusSchema } from "../gen/google/rpc/status_pb.js";
import { PolicyService } from "../gen/policy/v1/policy_pb.js";

/** @import { DescMethodUnary, MessageInitShape, MessageShape } from "@bufbuild/protobuf" */
/** @import { Config } from "./config.js" */

/**
 * The retries are gRPC's own: it repeats what failed with UNAVAILABLE, and a `grpc-retry-pushback-ms` of the service takes
 * precedence over the backoff. Repetitions go to the next replica.
 */
const SERVICE_CONFIG = {
  loadBalancingConfig: [{ round_robin: {} }],
  methodConfig: [
    {
      name: [{ service: "policy.v1.PolicyService" }],
      retryPolicy: {
        maxAttempts: 4,
        initialBackoff: "0.05s",
        maxBackoff: "1s",
        backoffMultiplier: 2,
        retryableStatusCodes: ["UNAVAILABLE"],
      },
    },
  ],
};

/** How long the service is not asked again once it was found to be away. */
const REST_AFTER_LOSS_MS = 1_000;
const SECOND_TRY_MS = 250;

/** Nobody answers; everything else that goes wrong is an answer of the service. */
export class AwayError extends Error {}

/** It was found to be away a moment ago and is not asked. */
class RestingError extends AwayError {}

export class Service {
  /** @param {Config["policy"]} config */
  constructor(config) {
    this.config = config;
    const security = config.ca_file
      ? grpc.credentials.createSsl(readFileSync(config.ca_file))
      : grpc.credentials.createInsecure();
    this.client = new grpc.Client(config.address, security, {
      "grpc.service_config": JSON.stringify(SERVICE_CONFIG),
      "grpc.keepalive_time_ms": 30_000,
      "grpc.keepalive_permit_without_calls": 1,
      "grpc.initial_reconnect_backoff_ms": 50,
      "grpc.max_reconnect_backoff_ms": 250, // a replica that is back must be known before the next one goes
    });
    this.metadata = new grpc.Metadata();
    if (config.key) this.metadata.set("authorization", `Bearer ${config.key}`);
    this.awayUntil = 0;
    this.away = `the policy service is away (${config.address})`;
  }

  /**
   * Asks where to go.
   *
   * @param {MessageInitShape<typeof PolicyService.method.selectTarget.input>} request
   * @param {number} waitMs how long the call may stand in line
   * @param {AbortSignal} signal
   */
  async select(request, waitMs, signal) {
    if (!request.lease && Date.now() < this.awayUntil) throw new RestingError(`${this.away}: not asked for a moment`);
    return this.call(PolicyService.method.selectTarget, request, waitMs + this.config.select_timeout_ms, signal);
  }

  /**
   * Tells what came back and hears what it means.
   *
   * @param {MessageInitShape<typeof PolicyService.method.reportOutcome.input>} request
   * @param {AbortSignal} [signal]
   */
  report(request, signal) {
    return this.call(PolicyService.method.reportOutcome, request, this.config.report_timeout_ms, signal);
  }

  /**
   * @param {MessageInitShape<typeof PolicyService.method.checkFence.input>} request
   *
   * @param {AbortSignal} signal
   */
  checkFence(request, signal) {
    return this.call(PolicyService.method.checkFence, request, this.config.report_timeout_ms, signal);
  }

  /** Extends the permits of a decision. @param {Uint8Array} decisionToken */
  renew(decisionToken) {
    return this.call(PolicyService.method.renewPermit, { decisionToken }, this.config.report_timeout_ms);
  }

  /** Frees the permits of a decision that will send no final report. @param {Uint8Array} decisionToken */
  release(decisionToken) {
    return this.call(PolicyService.method.releasePermit, { decisionToken }, this.config.report_timeout_ms);
  }

  /** Gives back what a SelectTarget holds whose answer did not arrive. @param {string} requestId */
  cancel(requestId) {
    return this.call(PolicyService.method.cancelPermit, { requestId }, this.config.report_timeout_ms);
  }

  /**
   * One unary call. A failure that is not the service's own becomes an AwayError, and is remembered for a moment.
   *
   * @template {DescMethodUnary} M
   * @param {M} method
   * @param {MessageInitShape<M["input"]>} request
   * @param {number} timeoutMs
   * @param {AbortSignal} [signal] cancels the call
   * @returns {Promise<MessageShape<M["output"]>>}
   */
  async call(method, request, timeoutMs, signal) {
    const until = Date.now() + timeoutMs;
    try {
      const answer = await this.twice(method, request, until, signal);
      this.awayUntil = 0;
      return answer;
    } catch (error) {
      signal?.throwIfAborted(); // a client that has left says nothing about the service
      if (!isAway(/** @type {grpc.ServiceError} */ (error))) throw error;
      this.awayUntil = Date.now() + REST_AFTER_LOSS_MS;
      throw new AwayError(`${this.away}: ${/** @type {grpc.ServiceError} */ (error).message}`, { cause: error });
    }
  }

  /**
   * gRPC's retries all fit into a moment in which one replica ends and the one before is not yet known to be back.
   *
   * @template {DescMethodUnary} M
   * @param {M} method
   * @param {MessageInitShape<M["input"]>} request
   * @param {number} until
   * @param {AbortSignal} [signal]
   * @returns {Promise<MessageShape<M["output"]>>}
   */
  async twice(method, request, until, signal) {
    try {
      return await this.unary(method, request, until, signal);
    } catch (error) {
      const isLate = this.awayUntil > 0 || Date.now() + SECOND_TRY_MS >= until;
      if (isLate || signal?.aborted || !isAway(/** @type {grpc.ServiceError} */ (error))) throw error;
      await sleep(SECOND_TRY_MS, undefined, { ref: false });
      return this.unary(method, request, until, signal);
    }
  }

  /**
   * @template {DescMethodUnary} M
   * @param {M} method
   * @param {MessageInitShape<M["input"]>} request
   * @param {number} until
   * @param {AbortSignal} [signal]
   * @returns {Promise<MessageShape<M["output"]>>}
   */
  unary(method, request, until, signal) {
    return new Promise((resolve, reject) => {
      const cancel = () => call.cancel();
      const call = this.client.makeUnaryRequest(
        `/${method.parent.typeName}/${method.name}`,
        (/** @type {MessageShape<M["input"]>} */ message) => Buffer.from(toBinary(method.input, message)),
        (bytes) => fromBinary(method.output, bytes),
        /** @type {MessageShape<M["input"]>} */ (create(method.input, request)),
        this.metadata,
        { deadline: until },
        (error, answer) => {
          signal?.removeEventListener("abort", cancel);
          if (error) reject(error);
          else resolve(/** @type {MessageShape<M["output"]>} */ (answer));
        },
      );
      signal?.addEventListener("abort", cancel, { once: true });
      if (signal?.aborted) cancel();
    });
  }

  close() {
    this.client.close();
  }
}

const OF_THE_TRANSPORT = [
  grpc.status.UNAVAILABLE,
  grpc.status.DEADLINE_EXCEEDED,
  grpc.status.CANCELLED,
  grpc.status.INTERNAL,
];

/**
 * A failure without ErrorInfo is the transport's. A replica that starts or ends says so itself and is away as well.
 *
 * @param {grpc.ServiceError} error
 */
function isAway(error) {
  const reason = reasonOf(error);
  return reason ? ["DRAINING", "NOT_READY"].includes(reason) : OF_THE_TRANSPORT.includes(error.code);
}

/** The call was made, and nobody knows what the service did with it. @param {any} error */
export function isCutOff(error) {
  return !(error instanceof RestingError) && !reasonOf(error?.cause ?? error);
}

/** The same call may go well later. Other refusals are final. @param {any} error */
export function isPassing(error) {
  const { UNAVAILABLE, RESOURCE_EXHAUSTED, DEADLINE_EXCEEDED } = grpc.status;
  return error instanceof AwayError || [UNAVAILABLE, RESOURCE_EXHAUSTED, DEADLINE_EXCEEDED].includes(error?.code);
}

/**
 * ErrorInfo.reason: the name of an ErrorReason; empty where the service did not send the error.
 *
 * @param {grpc.ServiceError} error
 */
export function reasonOf(error) {
  const [bytes] = error?.metadata?.get("grpc-status-details-bin") ?? [];
  const details = Buffer.isBuffer(bytes) ? fromBinary(StatusSchema, bytes).details : [];
  const infos = details.map((detail) => anyUnpack(detail, ErrorInfoSchema));
  return infos.find((info) => info?.domain === "policy.v1")?.reason ?? "";
}
