/**
 * Calls that no client waits for. One that finds the service away is kept and made again: reports are taken for a day, and
 * repeating one changes nothing.
 */
import { setTimeout as sleep } from "node:timers/promises";
import { AwayError } from "./service.js";

/** @typedef {() => Promise<unknown>} Call */

const MAX_LATE = 1_000;
const RETRY_LATE_MS = 1_000;

export class Outbox {
  /** @param {(text: string, fields: object) => void} log */
  constructor(log) {
    this.log = log;
    /** @type {Set<Promise<void>>} */
    this.underWay = new Set();
    /** @type {Call[]} */
    this.late = [];
    this.isRetrying = false;
  }

  /** @param {Call} call */
  send(call) {
    const done = this.make(call).finally(() => this.underWay.delete(done));
    this.underWay.add(done);
  }

  /** @param {Call} call */
  async make(call) {
    try {
      await call();
    } catch (error) {
      if (error instanceof AwayError) this.keep(call);
      else this.log("the service did not take a report", { error: String(error) });
    }
  }

  /** @param {Call} call */
  keep(call) {
    if (this.late.length >= MAX_LATE) this.log("a report is lost: too many are waiting for the service", {});
    else this.late.push(call);
    if (!this.isRetrying) void this.retry();
  }

  async retry() {
    this.isRetrying = true;
    while (this.late.length > 0) {
      await sleep(RETRY_LATE_MS, undefined, { ref: false });
      const calls = this.late.splice(0);
      await Promise.all(calls.map((call) => this.make(call)));
    }
    this.isRetrying = false;
  }

  /** Until what is under way is out. */
  async settle() {
    await Promise.all(this.underWay);
  }
}
