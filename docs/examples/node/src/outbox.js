/**
 * Calls that no client waits for. One that finds the service away or overloaded is kept and made again: reports are taken for a
 * day, and repeating one, or giving a permit back twice, changes nothing.
 */
import { setTimeout as sleep } from "node:timers/promises";
import { isPassing } from "./service.js";

/** @typedef {() => Promise<unknown>} Errand */

const MAX_LATE = 1_000;
const RETRY_LATE_MS = 1_000;
const LOOK_MS = 10;

export class Outbox {
  /** @param {(text: string, fields: object) => void} log @param {string} policy where the service is looked for */
  constructor(log, policy) {
    this.log = log;
    this.policy = policy;
    /** Errands that have not been made yet. */
    this.owed = 0;
    /** @type {Errand[]} */
    this.late = [];
    this.isRetrying = false;
  }

  /** @param {Errand} errand */
  send(errand) {
    this.owed += 1;
    void this.make(errand);
  }

  /** @param {Errand} errand @returns {Promise<boolean>} false: it is to be made again */
  async make(errand) {
    try {
      await errand();
    } catch (error) {
      if (isPassing(error)) return this.keep(errand);
      this.log("the service did not take a report", { error: String(error) });
    }
    this.owed -= 1;
    return true;
  }

  /** @param {Errand} errand */
  keep(errand) {
    if (this.late.length < MAX_LATE) {
      this.late.push(errand);
      if (!this.isRetrying) void this.retry();
    } else {
      this.owed -= 1;
      this.log("a report is lost: too many are waiting for the service", {});
    }
    return false;
  }

  /** One errand after the other. One that fails goes to the back: it must not hold up those that would not. */
  async retry() {
    this.isRetrying = true;
    await sleep(RETRY_LATE_MS, undefined, { ref: false });
    for (let errand = this.late.shift(); errand; errand = this.late.shift()) {
      if (!(await this.make(errand))) await sleep(RETRY_LATE_MS, undefined, { ref: false });
    }
    this.isRetrying = false;
  }

  /** Until nothing is owed. @param {number} longestMs */
  async close(longestMs) {
    const until = performance.now() + longestMs;
    while (this.owed > 0 && performance.now() < until) await sleep(LOOK_MS);
    if (this.owed > 0) this.log("reports are lost: the service is away", { policy: this.policy, reports: this.owed });
  }
}
