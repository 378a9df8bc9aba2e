/** One upstream call under a decision. */
import { ActionKind } from "../gen/policy/v1/policy_pb.js";
import { FenceStatus } from "../gen/policy/v1/lease_pb.js";
import { Answer, refused } from "./answers.js";
import { earlierAttempt, nameOf, reportOf, textOf } from "./report.js";
import { call } from "./upstream.js";

/** @import { Action, Dispatch } from "../gen/policy/v1/policy_pb.js" */
/** @import { Header, Target } from "../gen/policy/v1/types_pb.js" */
/** @import { Held } from "./held.js" */
/** @import { Journey } from "./journey.js" */
/** @import { Result } from "./upstream.js" */

/** What the service says comes next. @typedef {Pick<Action, "kind" | "nextTarget" | "delayMs" | "setHeaders">} NextStep */
/** @typedef {{answer: Answer | undefined, action?: NextStep}} Made */

/** How long a decision stands for the lease that it was made with. */
const FRESH_MS = 1_000;

export class Attempt {
  /**
   * @param {Journey} journey
   * @param {Held} held
   * @param {Dispatch} dispatch
   * @param {{number: number, target: Target, headers: Header[], following: Target | undefined}} place in the decision; `headers` are
   *   to be set, `following` is the target behind this one
   */
  constructor(journey, held, dispatch, place) {
    this.journey = journey;
    this.gateway = journey.gateway;
    this.held = held;
    this.dispatch = dispatch;
    this.number = place.number;
    this.target = place.target;
    this.headers = place.headers;
    this.following = place.following;
    this.offsetMs = 0; // from the decision to this call
  }

  /**
   * Calls the target. A success has no action: it is on its way to the client and is reported when its body ends. A failure is
   * reported at once; `answer` is what the client gets if the action is to go no further.
   *
   * @returns {Promise<Made>}
   */
  async make() {
    const refusal = await this.checkFence();
    if (refusal) return { answer: refusal };
    const { stripHeaders: strip, attemptPolicy, degradations } = this.dispatch;
    const timeoutMs = Number(attemptPolicy?.targetTimeoutMs ?? 0);
    this.offsetMs = performance.now() - this.held.since;
    const result = await call(this.journey, this.target, { timeoutMs, set: this.headers, strip, degradations });
    if (this.journey.signal.aborted) {
      result.cancelled = true;
      result.close();
      this.finish(result);
      this.journey.signal.throwIfAborted();
    }
    if (!result.failed) {
      this.held.isReported = true;
      return { answer: result.stream((ended) => this.finish(ended)) };
    }
    return this.afterFailure(result);
  }

  /**
   * Sends the last report of the decision, which frees its permits, without keeping anybody waiting.
   *
   * @param {Result} result
   */
  finish(result) {
    this.held.stop();
    this.deliver(reportOf(this, result, true));
  }

  /** @param {ReturnType<typeof reportOf>} report */
  deliver(report) {
    this.gateway.outbox.send(() => this.gateway.service.report(report));
  }

  /** @param {Result} result @returns {Promise<Made>} */
  async afterFailure(result) {
    const report = reportOf(this, result, false); // whether another attempt follows is only known from the answer
    let told;
    try {
      told = await this.gateway.service.report(report);
    } catch (error) {
      this.deliver(report);
      return { answer: result.forClient(undefined), action: this.localAction(result) };
    }
    const { verdict, action } = told;
    this.gateway.log("attempt failed", {
      target: nameOf(this.target),
      outcome: textOf(result),
      verdict: verdict?.reasonText,
      action: action?.kindText,
    });
    this.journey.earlier.push(earlierAttempt(this.target, result, verdict));
    return { answer: result.forClient(verdict), action: action ?? this.localAction(result) };
  }

  /**
   * Stands in for the service where a report found nobody: on to the next target of the decision, if there is
   * one.
   *
   * @param {Result} result
   */
  localAction(result) {
    const goOn = this.gateway.config.fail_mode === "open" && this.following && result.isWorthAnother;
    const kind = goOn ? ActionKind.FALL_BACK : ActionKind.RETURN_TO_CLIENT;
    return { kind, nextTarget: this.following, delayMs: 0n, setHeaders: [] };
  }

  /**
   * The last word before a call with a lease that no fresh decision covers: a session that has lost its connection meanwhile
   * must not use it.
   */
  async checkFence() {
    const { lease, caller: callerKeySha256, signal } = this.journey;
    const isFresh = this.number === 0 && performance.now() - this.held.since < FRESH_MS;
    if (!lease || isFresh) return undefined;
    const fence = { lease, callerKeySha256, connection: this.target.connection, decisionToken: this.held.token };
    try {
      const { status } = await this.gateway.service.checkFence(fence, signal);
      if (status === FenceStatus.VALID) return undefined;
      return Answer.failure(409, FENCE_CODES[status] ?? "LEASE_REQUIRED", "lease_error", "the lease does not hold any more");
    } catch (error) {
      return refused(error);
    }
  }
}

/** @type {Partial<Record<FenceStatus, string>>} */
const FENCE_CODES = {
  [FenceStatus.REQUIRED]: "LEASE_REQUIRED",
  [FenceStatus.STALE]: "LEASE_FENCE_STALE",
  [FenceStatus.AUTHORIZATION_MISMATCH]: "LEASE_AUTHORIZATION_MISMATCH",
  [FenceStatus.CONNECTION_MISMATCH]: "LEASE_CONNECTION_MISMATCH",
};
