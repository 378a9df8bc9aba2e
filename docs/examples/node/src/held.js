/** What a decision holds while it is carried out: its token, and the renewal of its permits. */

/** @import { Dispatch, SelectTargetResponse } from "../gen/policy/v1/policy_pb.js" */
/** @import { Gateway } from "./gateway.js" */

export class Held {
  /**
   * @param {Gateway} gateway
   * @param {SelectTargetResponse} decision
   * @param {Dispatch} dispatch
   */
  constructor(gateway, decision, dispatch) {
    this.gateway = gateway;
    this.token = decision.decisionToken;
    this.since = performance.now();
    const [permit] = dispatch.permits;
    if (permit) {
      const lifeMs = Number(permit.expiresAtUnixMs - decision.decidedAtUnixMs);
      this.timer = setInterval(() => this.renew(), Math.max(lifeMs / 3, 100));
    }
  }

  /** Keeps the permits of a long answer. Without it their slots go to others when the TTL ends. */
  async renew() {
    try {
      const { results } = await this.gateway.service.renew(this.token);
      for (const { permitId, code } of results) if (code) this.gateway.log("a permit is lost", { permitId, code });
    } catch (error) {
      this.gateway.log("permits were not renewed", { error: String(error) });
    }
  }

  stop() {
    clearInterval(this.timer);
  }

  /** Frees what the decision holds where none of its reports was the final one. */
  release() {
    this.stop();
    this.gateway.outbox.send(() => this.gateway.service.release(this.token));
  }
}
