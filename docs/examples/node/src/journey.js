/** One client request on its way: ask, call, report and fall back until there is an answer. */
import { createHash, randomUUID } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";
import { ActionKind } from "../gen/policy/v1/policy_pb.js";
import { WaitReason } from "../gen/policy/v1/reasons_pb.js";
import { Answer, discard, unavailable } from "./answers.js";
import { Attempt } from "./attempt.js";
import { withoutDecision } from "./failmode.js";
import { Held, withdraw } from "./held.js";
import { nameOf } from "./report.js";
import { isCutOff } from "./service.js";

/** @import { MessageInitShape } from "@bufbuild/protobuf" */
/** @import { IncomingHttpHeaders } from "node:http" */
/** @import { NextStep } from "./attempt.js" */
/** @import { Dispatch, Reject, SelectTargetResponse, Wait } from "../gen/policy/v1/policy_pb.js" */
/** @import { EarlierAttemptSchema, Target } from "../gen/policy/v1/types_pb.js" */
/** @import { Gateway } from "./gateway.js" */

/** Where the service says nothing else. */
const MAX_DISPATCHES = 30;

export class Journey {
  /**
   * @param {Gateway} gateway
   * @param {{path: string, headers: IncomingHttpHeaders, body: Record<string, any>, text: string, lease?: {owner: string, generation: bigint}}} request
   * @param {AbortSignal} signal is aborted when the client leaves
   */
  constructor(gateway, request, signal) {
    this.gateway = gateway;
    this.request = request;
    this.signal = signal;
    this.route = gateway.config.routes[request.body.model] ?? request.body.model;
    this.id = randomUUID();
    this.caller = callerOf(request.headers);
    this.lease = request.lease;
    this.deadline = performance.now() + gateway.config.request_timeout_ms;
    this.patient = false; // ready to wait for a target
    this.asked = 0; // SelectTarget calls so far
    this.askedAs = ""; // request id of the last one
    this.attempts = 0; // upstream calls so far
    /** @type {Uint8Array<ArrayBufferLike>} */
    this.token = new Uint8Array();
    /** @type {MessageInitShape<typeof EarlierAttemptSchema>[]} */
    this.earlier = [];
  }

  get leftMs() {
    return Math.max(0, Math.round(this.deadline - performance.now()));
  }

  /**
   * Asks and does what the verdict says until there is an answer for the client.
   *
   * @returns {Promise<Answer>}
   */
  async run() {
    for (;;) {
      let decision;
      try {
        decision = await this.select();
      } catch (error) {
        if (isCutOff(error)) withdraw(this.gateway, this.askedAs);
        return withoutDecision(this, error);
      }
      const answer = await this.follow(decision);
      if (answer) return answer;
      this.signal.throwIfAborted();
    }
  }

  /** @param {SelectTargetResponse} decision @returns {Promise<Answer | undefined>} undefined: ask again */
  async follow(decision) {
    const { verdict } = decision;
    switch (verdict.case) {
      case "dispatch":
        this.gateway.memory.learn(this.route, verdict.value);
        return this.walk(decision, verdict.value);
      case "wait":
        return this.wait(verdict.value);
      case "reject":
        return this.reject(verdict.value);
      default:
        return unavailable("unknown_verdict");
    }
  }

  /**
   * Wants an answer at once first. Only after a refusal that time may cure it asks again, ready to stand in line: so a service
   * that does not answer is noticed after `select_timeout_ms`, not at the end of the longest line.
   */
  async select() {
    const patience = this.patient ? this.leftMs : 0;
    this.askedAs = `${this.id}-${this.asked}`;
    const decision = await this.gateway.service.select(
      {
        requestId: this.askedAs,
        route: this.route,
        callerKeySha256: this.caller,
        session: sessionOf(this.request),
        deadlineMs: BigInt(this.leftMs),
        allowWait: this.patient,
        waitBudgetMs: this.patient ? BigInt(patience) : undefined,
        earlierAttempts: this.earlier,
        lease: this.lease,
        previousDecisionToken: this.token,
      },
      patience,
      this.signal,
    );
    this.token = decision.decisionToken;
    this.asked += 1;
    return decision;
  }

  /** Sleeps as told if the client lives to see the end. @param {Wait} wait */
  async wait(wait) {
    const pause = Number(wait.waitMs);
    if (pause < this.leftMs) {
      if (wait.reason === WaitReason.IN_LINE) this.asked -= 1; // the place in line belongs to this request id
      this.earlier = []; // after a wait every target may be tried again
      await sleep(pause, undefined, { signal: this.signal }).catch(() => {});
      if (!this.signal.aborted) return undefined;
    }
    if (wait.ticket !== undefined) withdraw(this.gateway, this.askedAs);
    const message = "no target is free before the deadline of the request";
    return Answer.failure(503, wait.reasonText, "service_unavailable", message, pause);
  }

  /** Passes a refusal on; the first one that time may cure is asked again instead. @param {Reject} reject */
  reject(reject) {
    const mayPass = [429, 503].includes(reject.httpStatus);
    if (mayPass && !this.patient && this.leftMs > 0) {
      this.patient = true;
      return undefined;
    }
    return Answer.failure(reject.httpStatus, reject.code, reject.type, reject.message, Number(reject.retryAfterMs ?? 0));
  }

  /**
   * Makes the attempts of one decision.
   *
   * @param {SelectTargetResponse} decision
   * @param {Dispatch} dispatch
   * @returns {Promise<Answer | undefined>} undefined: ask again
   */
  async walk(decision, dispatch) {
    const held = new Held(this.gateway, decision, dispatch);
    try {
      return await this.attemptInTurn(held, dispatch);
    } finally {
      held.end();
    }
  }

  /** @param {Held} held @param {Dispatch} dispatch @returns {Promise<Answer | undefined>} */
  async attemptInTurn(held, dispatch) {
    const targets = [/** @type {Target} */ (dispatch.target), ...dispatch.fallbacks];
    /** @type {Target | undefined} */
    let target = targets[0];
    let headers = dispatch.setHeaders;
    const most = dispatch.attemptPolicy?.maxDispatches || MAX_DISPATCHES;
    for (let number = 0; target; number += 1) {
      const following = targets[targets.indexOf(target) + 1];
      const attempt = new Attempt(this, held, dispatch, { number, target, headers, following });
      const { answer, action } = await attempt.make();
      if (!action) return answer;
      const pause = Number(action.delayMs);
      if (isFinal(action) || this.attempts >= most || pause >= this.leftMs) return answer;
      discard(answer);
      await sleep(pause, undefined, { signal: this.signal });
      target = next(action, target, targets);
      headers = action.setHeaders;
    }
    return undefined;
  }
}

/**
 * The target of this decision that the action names; undefined where a new decision is needed.
 *
 * @param {NextStep} action
 * @param {Target} last
 * @param {Target[]} targets
 */
function next(action, last, targets) {
  if (action.kind === ActionKind.RETRY_SAME) return last;
  const wanted = action.kind === ActionKind.FALL_BACK && action.nextTarget ? nameOf(action.nextTarget) : "";
  return targets.find((target) => nameOf(target) === wanted);
}

/** The client gets what came. Also for kinds that this gateway does not know. @param {NextStep} action */
function isFinal(action) {
  return ![ActionKind.RETRY_SAME, ActionKind.FALL_BACK, ActionKind.WAIT_AND_SELECT].includes(action.kind);
}

/**
 * The hash that the catalogue knows the client's key by; the key itself never leaves the gateway.
 *
 * @param {IncomingHttpHeaders} headers
 */
function callerOf(headers) {
  const [, key] = /^Bearer (.+)$/i.exec(headers.authorization ?? "") ?? [];
  return key ? createHash("sha256").update(key).digest("hex") : "";
}

/** Lets the requests of one conversation stay with one account. @param {Journey["request"]} request */
function sessionOf({ headers, body }) {
  const id = headers["x-session-id"];
  const text = (/** @type {unknown} */ value) => (typeof value === "string" ? value : undefined);
  return {
    headers: id ? [{ name: "x-session-id", value: String(id) }] : [],
    conversationId: text(body.conversation_id),
    promptCacheKey: text(body.prompt_cache_key),
  };
}
