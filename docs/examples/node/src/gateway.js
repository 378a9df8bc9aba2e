/** The HTTP side: an OpenAI-shaped request comes in, the answer of an upstream goes back, streamed or not. */
import { once } from "node:events";
import http from "node:http";
import { Readable } from "node:stream";
import { pipeline } from "node:stream/promises";
import { Answer } from "./answers.js";
import { hostAndPort } from "./config.js";
import { Memory } from "./failmode.js";
import { Journey } from "./journey.js";
import { Outbox } from "./outbox.js";
import { Service } from "./service.js";

/** @import { IncomingMessage, ServerResponse } from "node:http" */
/** @import { Config } from "./config.js" */

const MAX_REQUEST_BYTES = 32 * 1024 * 1024;
/** Longest time for the reports of the last requests. */
const LAST_REPORTS_MS = 5_000;
const CHECKED_EVERY_MS = 500;

export class Gateway {
  /** @param {Config} config */
  constructor(config) {
    this.config = config;
    this.service = new Service(config.policy);
    this.memory = new Memory();
    this.outbox = new Outbox(this.log, config.policy.address);
    /** @type {Set<Promise<void>>} requests under way */
    this.underWay = new Set();
    const limits = { requestTimeout: config.request_timeout_ms, connectionsCheckingInterval: CHECKED_EVERY_MS };
    this.server = http.createServer(limits, (request, response) => {
      const served = this.serve(request, response).finally(() => this.underWay.delete(served));
      this.underWay.add(served);
    });
  }

  /** @param {string} text @param {object} fields */
  log(text, fields) {
    console.error(JSON.stringify({ text, ...fields }));
  }

  /** Listens, or throws what keeps it from that. */
  async listen() {
    const { listen, policy } = this.config;
    const { host, port } = /** @type {{host: string, port: number}} */ (hostAndPort(listen));
    this.server.listen(port, host);
    await once(this.server, "listening");
    this.log("listening", { address: listen, policy: policy.address });
  }

  /** Serves what is under way to its end, within `drain_ms`, and waits until its reports are out. */
  async close() {
    const cut = setTimeout(() => this.server.closeAllConnections(), this.config.drain_ms);
    await new Promise((resolve) => this.server.close(resolve));
    clearTimeout(cut);
    await Promise.all(this.underWay);
    await this.outbox.close(LAST_REPORTS_MS);
    this.service.close();
  }

  /** @param {IncomingMessage} request @param {ServerResponse} response */
  async serve(request, response) {
    const client = new AbortController();
    response.on("close", () => client.abort());
    try {
      await passOn(await this.answer(request, client.signal), response);
    } catch (error) {
      if (client.signal.aborted) return;
      this.log("the request broke off", { error: String(error) });
      if (response.headersSent) response.destroy();
      else response.writeHead(500).end();
    }
  }

  /** @param {IncomingMessage} request @param {AbortSignal} signal @returns {Promise<Answer>} */
  async answer(request, signal) {
    const path = pathOf(request);
    if (path === "/healthz") return new Answer(200, {}, Readable.from([]));
    if (request.method !== "POST" || !path.startsWith("/v1/")) {
      return Answer.failure(404, "not_found", "invalid_request_error", "POST to a path below /v1/");
    }
    const text = await read(request);
    if (text === undefined) {
      request.resume(); // a connection closed upon a client that still sends would take the answer with it
      return Answer.failure(413, "invalid_request", "invalid_request_error", "the body is too large");
    }
    const body = parsed(text);
    if (!body) return Answer.failure(400, "invalid_request", "invalid_request_error", "a JSON body with a model is needed");
    const { lease, code } = leaseOf(request);
    if (code) return Answer.failure(400, code, "lease_error", "the lease headers cannot be used");
    return new Journey(this, { path, headers: request.headers, body, text, lease }, signal).run();
  }
}

/**
 * Until the client has the answer or has left, and the last report is on its way.
 *
 * @param {Answer} answer
 * @param {ServerResponse} response
 */
async function passOn({ status, headers, body }, response) {
  const closed = new Promise((resolve) => body.once("close", resolve));
  try {
    response.writeHead(status, headers);
    response.flushHeaders();
    await pipeline(body, response);
  } finally {
    body.destroy();
    await closed;
  }
}

/** Path and query without steps upwards, which would leave the path of the upstream. @param {IncomingMessage} request */
function pathOf({ url = "/" }) {
  if (!url.startsWith("/") || !URL.canParse(url, "http://gateway")) return "";
  const { pathname, search } = new URL(`http://gateway${url}`);
  return pathname + search;
}

/**
 * The body, which is kept for every attempt.
 *
 * @param {IncomingMessage} request
 * @returns {Promise<string | undefined>} undefined: too large
 */
async function read(request) {
  if (Number(request.headers["content-length"] ?? 0) > MAX_REQUEST_BYTES) return undefined;
  const chunks = [];
  let length = 0;
  for await (const chunk of request.iterator({ destroyOnReturn: false })) {
    length += chunk.length;
    if (length > MAX_REQUEST_BYTES) return undefined;
    chunks.push(chunk);
  }
  return Buffer.concat(chunks).toString();
}

/** @param {string} text @returns {Record<string, any> | undefined} undefined: no request with a model */
function parsed(text) {
  try {
    const body = JSON.parse(text);
    return body && typeof body.model === "string" && body.model ? body : undefined;
  } catch {
    return undefined;
  }
}

/**
 * The lease headers, which are never sent upstream; the code of the contract where they cannot be used.
 *
 * @param {IncomingMessage} request
 */
function leaseOf({ headersDistinct }) {
  const owners = controlHeaders(headersDistinct, "lease-owner");
  const generations = controlHeaders(headersDistinct, "lease-generation");
  if (owners.size > 1 || generations.size > 1) return { code: "LEASE_CONTEXT_INVALID" };
  const [owner] = owners;
  const [generation] = generations;
  if (!owner && !generation) return {};
  if (!owner || !generation) return { code: "LEASE_CONTEXT_REQUIRED" };
  if (!/^[1-9]\d{0,17}$/.test(generation)) return { code: "LEASE_CONTEXT_INVALID" };
  return { lease: { owner, generation: BigInt(generation) } };
}

/**
 * What a header of the policy and its alias say; more than one: different things.
 *
 * @param {NodeJS.Dict<string[]>} headers
 * @param {string} name
 */
function controlHeaders(headers, name) {
  const values = [...(headers[`x-policy-${name}`] ?? []), ...(headers[`x-omniroute-${name}`] ?? [])];
  return new Set(values.filter(Boolean));
}
