/** The HTTP side: an OpenAI-shaped request comes in, the answer of an upstream goes back, streamed or not. */
import http from "node:http";
import { pipeline } from "node:stream/promises";
import { Answer } from "./answers.js";
import { Memory } from "./failmode.js";
import { Journey } from "./journey.js";
import { Outbox } from "./outbox.js";
import { Service } from "./service.js";

/** @import { IncomingHttpHeaders, IncomingMessage, ServerResponse } from "node:http" */
/** @import { Config } from "./config.js" */

const MAX_REQUEST_BYTES = 32 * 1024 * 1024;

export class Gateway {
  /** @param {Config} config */
  constructor(config) {
    this.config = config;
    this.service = new Service(config.policy);
    this.memory = new Memory();
    this.outbox = new Outbox(this.log);
    this.server = http.createServer((request, response) => void this.serve(request, response));
  }

  /** @param {string} text @param {object} fields */
  log(text, fields) {
    console.error(JSON.stringify({ text, ...fields }));
  }

  listen() {
    const [, host, port] = /** @type {RegExpExecArray} */ (/^(.*):(\d+)$/.exec(this.config.listen));
    this.server.listen(Number(port), host, () => {
      this.log("listening", { address: this.config.listen, policy: this.config.policy.address });
    });
  }

  /** Serves what is under way to its end, and waits until its reports are out. */
  async close() {
    await new Promise((resolve) => this.server.close(resolve));
    await this.outbox.settle();
    this.service.close();
  }

  /** @param {IncomingMessage} request @param {ServerResponse} response */
  async serve(request, response) {
    const client = new AbortController();
    response.on("close", () => client.abort());
    try {
      const answer = await this.answer(request, client.signal);
      response.writeHead(answer.status, answer.headers);
      response.flushHeaders();
      await pipeline(answer.body, response);
    } catch (error) {
      if (!client.signal.aborted) this.log("the request broke off", { error: String(error) });
      response.destroy();
    }
  }

  /** @param {IncomingMessage} request @param {AbortSignal} signal @returns {Promise<Answer>} */
  async answer(request, signal) {
    const path = request.url ?? "/";
    if (path === "/healthz") return Answer.failure(200, "", "", "ok");
    if (request.method !== "POST" || !path.startsWith("/v1/")) {
      return Answer.failure(404, "not_found", "invalid_request_error", "POST to a path below /v1/");
    }
    const body = await readBody(request);
    if (!body) return Answer.failure(400, "invalid_request", "invalid_request_error", "a JSON body with a model is needed");
    const { lease, code } = leaseOf(request.headers);
    if (code) return Answer.failure(400, code, "lease_error", "the lease headers cannot be used");
    return new Journey(this, { path, headers: request.headers, body, lease }, signal).run();
  }
}

/**
 * The body is kept for every attempt.
 *
 * @param {IncomingMessage} request
 * @returns {Promise<Record<string, any> | undefined>}
 */
async function readBody(request) {
  const chunks = [];
  let length = 0;
  for await (const chunk of request) {
    length += chunk.length;
    if (length > MAX_REQUEST_BYTES) return undefined;
    chunks.push(chunk);
  }
  try {
    const body = JSON.parse(Buffer.concat(chunks).toString());
    return body && typeof body.model === "string" && body.model ? body : undefined;
  } catch {
    return undefined;
  }
}

/**
 * The lease headers, which are never sent upstream; the code of the contract where they cannot be used.
 *
 * @param {IncomingHttpHeaders} headers
 */
function leaseOf(headers) {
  const owners = controlHeaders(headers, "lease-owner");
  const generations = controlHeaders(headers, "lease-generation");
  if (owners.size > 1 || generations.size > 1) return { code: "LEASE_CONTEXT_INVALID" };
  const [owner] = owners;
  const [generation] = generations;
  if (!owner && !generation) return {};
  if (!owner || !generation) return { code: "LEASE_CONTEXT_REQUIRED" };
  if (!/^[1-9]\d{0,15}$/.test(generation)) return { code: "LEASE_CONTEXT_INVALID" };
  return { lease: { owner, generation: BigInt(generation) } };
}

/**
 * What a header of the policy and its alias say; more than one: different things.
 *
 * @param {IncomingHttpHeaders} headers
 * @param {string} name
 */
function controlHeaders(headers, name) {
  const values = [headers[`x-policy-${name}`], headers[`x-omniroute-${name}`]];
  return new Set(values.filter(Boolean).map(String));
}
