/** What a decision holds while it is carried out: its token, and the renewal of its permits. */

/** @import { Dispatch, SelectTargetResponse } from "../gen/policy/v1/policy_pb.js" */
/** @import { Gateway } from "./gateway.js" */

const SHORTEST_RENEWAL_MS = 100;
/** How long after the first look for a grant that nobody has heard of the second one follows. */
const SECOND_LOOK_MS = 2_000;

export class Held {
  /** A final report is out, or will be when the body of the answer ends. */
  isReported = false;

  /**
   * @param {Gateway} gateway
   * @param {SelectTargetResponse} decision
   * @param {Dispatch} dispatch
   */
  constructor(gateway, decision, dispatch) {
    this.gateway = gateway;
    this.token = decision.decisionToken;
    this.since = performance.now();
    const lives = dispatch.permits.map((permit) => Number(permit.expiresAtUnixMs - decision.decidedAtUnixMs));
    if (lives.length > 0) {
      this.timer = setInterval(() => this.renew(), Math.max(Math.min(...lives) / 3, SHORTEST_RENEWAL_MS));
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

  /** The final report is about to be sent. */
  stop() {
    this.isReported = true;
    clearInterval(this.timer);
  }

  /** Frees what the decision holds where none of its reports is the final one. */
  end() {
    if (this.isReported) return;
    this.stop();
    this.gateway.outbox.send(() => this.gateway.service.release(this.token));
  }
}

/**
 * Gives back what a SelectTarget took whose answer did not arrive, and a place in line that nobody comes back for. The service
 * may not be through with that call: where it finds nothing it is asked once more.
 *
 * @param {Gateway} gateway
 * @param {string} requestId
 */
export function withdraw({ service, outbox }, requestId) {
  outbox.send(async () => {
    const { results } = await service.cancel(requestId);
    if (results.length > 0) return;
    setTimeout(() => outbox.send(() => service.cancel(requestId)), SECOND_LOOK_MS).unref();
  });
}
