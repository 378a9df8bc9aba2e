/** What the gateway does while the service is away. */
import { refused, discard, unavailable } from "./answers.js";
import { nameOf } from "./report.js";
import { AwayError } from "./service.js";
import { call } from "./upstream.js";

/** @import { Answer } from "./answers.js" */
/** @import { Dispatch } from "../gen/policy/v1/policy_pb.js" */
/** @import { Target } from "../gen/policy/v1/types_pb.js" */
/** @import { Journey } from "./journey.js" */

/** What the gateway remembers for the time when the service is away. */
export class Memory {
  constructor() {
    /** @type {Map<string, Target[]>} of each route, the last order */
    this.orders = new Map();
    /** @type {Set<string>} targets that may not be used without the service: leased, managed, capped */
    this.barred = new Set();
  }

  /** @param {string} route @param {Dispatch} dispatch */
  learn(route, dispatch) {
    const target = /** @type {Target} */ (dispatch.target);
    this.orders.set(route, [target, ...dispatch.fallbacks]);
    if (dispatch.noFailOpen) this.barred.add(nameOf(target));
    else this.barred.delete(nameOf(target));
  }

  /** The last known order of a route without the targets that are barred. @param {string} route */
  order(route) {
    return (this.orders.get(route) ?? []).filter((target) => !this.barred.has(nameOf(target)));
  }
}

/**
 * Answers where SelectTarget failed. Only a service that is away may be done without, and never for a lease.
 *
 * @param {Journey} journey
 * @param {unknown} error
 */
export async function withoutDecision(journey, error) {
  journey.signal.throwIfAborted();
  journey.gateway.log("no decision", { route: journey.route, error: String(error) });
  if (!(error instanceof AwayError)) return refused(error);
  const isOpen = journey.gateway.config.fail_mode === "open" && !journey.lease;
  return (isOpen && (await failOpen(journey))) || unavailable("policy_unavailable");
}

/**
 * Follows the last known order. What these calls bring is not reported.
 *
 * @param {Journey} journey
 * @returns {Promise<Answer | undefined>} undefined: no order is known
 */
async function failOpen(journey) {
  const order = journey.gateway.memory.order(journey.route);
  for (const target of order) {
    const result = await call(journey, target, { timeoutMs: 0, set: [], strip: [], degradations: [] });
    if (!result.failed) return result.stream(() => {});
    const answer = result.forClient(undefined);
    if (target === order.at(-1) || !result.isWorthAnother) return answer;
    discard(answer);
    journey.signal.throwIfAborted();
  }
  return undefined;
}
