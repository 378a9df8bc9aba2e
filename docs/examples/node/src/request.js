/** The request as it goes upstream. */
import http from "node:http";
import https from "node:https";
import { membersOf, textOf } from "./body.js";

/** @import { ClientRequest, IncomingHttpHeaders, IncomingMessage, OutgoingHttpHeaders } from "node:http" */
/** @import { Degradation, Target } from "../gen/policy/v1/types_pb.js" */
/** @import { Upstream } from "./config.js" */
/** @import { Journey } from "./journey.js" */
/** @import { Wishes } from "./upstream.js" */

const CONNECT_MS = 5_000;

/** Headers of one connection, which no proxy passes on; `connection` names more. */
const HOP_BY_HOP = [
  ...["connection", "keep-alive", "proxy-connection", "proxy-authenticate", "proxy-authorization"],
  ...["te", "trailer", "transfer-encoding", "upgrade"],
];
/** Headers that end here: the client's credential and address, and what the gateway makes itself. */
const GATEWAYS_OWN = [
  ...["authorization", "x-api-key", "api-key", "cookie", "accept-encoding", "content-length", "host", "expect"],
  ...["forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip"],
];

const AGENTS = { "http:": new http.Agent({ keepAlive: true }), "https:": new https.Agent({ keepAlive: true }) };

/**
 * Headers that may be passed on, in either direction.
 *
 * @template {IncomingHttpHeaders} H
 * @param {H} headers
 */
export function endToEnd(headers) {
  const named = (headers.connection ?? "").split(",").map((name) => name.trim().toLowerCase());
  const kept = Object.entries(headers).filter(([name]) => !HOP_BY_HOP.includes(name) && !named.includes(name));
  return /** @type {OutgoingHttpHeaders} */ (Object.fromEntries(kept));
}

/**
 * The client's request with the target's model and credential, without the headers of the policy.
 *
 * @param {Journey["request"]} request
 * @param {Target} target
 * @param {Upstream} upstream
 * @param {Wishes} wishes
 * @param {AbortSignal} signal
 * @returns {Promise<IncomingMessage>}
 */
export function send(request, target, upstream, { set, strip, degradations }, signal) {
  const url = new URL(upstream.base_url.replace(/\/$/, "") + request.path);
  const body = bodyFor(request, target.model, degradations);
  const headers = endToEnd(request.headers);
  const isPolicy = (/** @type {string} */ name) => /^x-(policy|omniroute)-/.test(name);
  const dropped = [...Object.keys(headers).filter(isPolicy), ...GATEWAYS_OWN, ...strip.map((name) => name.toLowerCase())];
  for (const name of dropped) delete headers[name];
  for (const { name, value } of set) headers[name.toLowerCase()] = value;
  Object.assign(headers, upstream.headers, { "content-length": String(Buffer.byteLength(body)) });
  return sent(url, { method: "POST", headers, signal }, body);
}

/**
 * A connection of the pool may have been closed by the upstream a moment ago: then the request is sent anew, once, on another.
 *
 * @param {URL} url
 * @param {https.RequestOptions} options
 * @param {string} body
 * @param {boolean} [again]
 * @returns {Promise<IncomingMessage>}
 */
function sent(url, options, body, again = false) {
  const { request: open } = url.protocol === "https:" ? https : http;
  const agent = again ? false : AGENTS[/** @type {keyof typeof AGENTS} */ (url.protocol)];
  return new Promise((resolve, reject) => {
    const request = open(url, { ...options, agent }, resolve);
    request.on("error", (/** @type {NodeJS.ErrnoException} */ error) => {
      const isStale = request.reusedSocket && ["ECONNRESET", "EPIPE"].includes(error.code ?? "");
      if (isStale && !again) sent(url, options, body, true).then(resolve, reject);
      else reject(error);
    });
    limitConnecting(request);
    request.end(body);
  });
}

/** @param {ClientRequest} request */
function limitConnecting(request) {
  request.once("socket", (socket) => {
    if (!socket.connecting) return;
    const late = Object.assign(new Error("no connection in time"), { code: "ETIMEDOUT" });
    const timer = setTimeout(() => request.destroy(late), CONNECT_MS);
    socket.once("connect", () => clearTimeout(timer));
    socket.once("close", () => clearTimeout(timer));
  });
}

/**
 * The client's body with the model of the target, and with no more tools than the target takes.
 *
 * @param {Journey["request"]} request
 * @param {string} model
 * @param {Degradation[]} degradations
 */
function bodyFor({ body, text }, model, degradations) {
  const members = membersOf(text);
  if (model) members.set("model", JSON.stringify(model));
  for (const { toolLimit } of degradations) {
    if (toolLimit !== undefined && Array.isArray(body.tools)) {
      members.set("tools", JSON.stringify(body.tools.slice(0, toolLimit)));
    }
  }
  return textOf(members);
}
