/**
 * The configuration file: the same one as that of the Go gateway. Times are milliseconds, as everywhere in the contract.
 *
 * @typedef {object} Upstream
 * @property {string} base_url where one connection is reached
 * @property {Record<string, string>} [headers] carry its credential
 *
 * @typedef {object} Config
 * @property {string} listen host:port
 * @property {{address: string, ca_file: string, key: string, select_timeout_ms: number, report_timeout_ms: number}} policy
 *   where the service is: host:port, unix:PATH, or ipv4:HOST:PORT,HOST:PORT for several replicas; `ca_file` switches TLS on;
 *   `key` is the bearer key; the deadlines of the two calls, waiting in line not counted
 * @property {"open" | "closed"} fail_mode while the service is away: follow the last known order, or answer 503
 * @property {number} request_timeout_ms how long a client waits for its answer to begin: waits and attempts together
 * @property {number} first_byte_timeout_ms ends one attempt that does not answer
 * @property {number} idle_timeout_ms ends one attempt that falls silent
 * @property {Record<string, string>} routes route of a model that clients name; a model that is not listed is its own route
 * @property {Record<string, Upstream>} upstreams by "provider/connection", every connection of the service's catalogue
 */
import { readFileSync } from "node:fs";

const DEFAULTS = {
  listen: "127.0.0.1:8080",
  fail_mode: "open",
  request_timeout_ms: 60_000,
  first_byte_timeout_ms: 30_000,
  idle_timeout_ms: 30_000,
  routes: {},
  upstreams: {},
};
const POLICY_DEFAULTS = {
  address: "127.0.0.1:50051",
  ca_file: "",
  key: "",
  select_timeout_ms: 250,
  report_timeout_ms: 1_000,
};

/**
 * @param {object} given
 * @param {object} known
 * @returns {string[]} names that no one would read
 */
function strange(given, known) {
  return Object.keys(given).filter((name) => name !== "policy" && !(name in known));
}

/**
 * Reads the file. $NAME in `policy.key` and in headers is replaced by the environment variable.
 *
 * @param {string} path
 * @returns {Config}
 */
export function loadConfig(path) {
  const given = JSON.parse(readFileSync(path, "utf8"));
  const unknown = [...strange(given, DEFAULTS), ...strange(given.policy ?? {}, POLICY_DEFAULTS)];
  if (unknown.length > 0) {
    throw new Error(`unknown: ${unknown.join(", ")}`); // a misspelt fail_mode would quietly be the default
  }
  /** @type {Config} */
  const config = { ...DEFAULTS, ...given, policy: { ...POLICY_DEFAULTS, ...given.policy } };
  if (!["open", "closed"].includes(config.fail_mode)) {
    throw new Error(`fail_mode: "${config.fail_mode}" is neither open nor closed`);
  }
  config.policy.key = expand(config.policy.key);
  if (config.policy.key && !config.policy.ca_file && !isLocal(config.policy.address)) {
    throw new Error("policy: a key goes to another host with ca_file only");
  }
  for (const upstream of Object.values(config.upstreams)) {
    new URL(upstream.base_url);
    const headers = Object.entries(upstream.headers ?? {});
    upstream.headers = Object.fromEntries(headers.map(([name, value]) => [name.toLowerCase(), expand(value)]));
  }
  return config;
}

/** @param {string} text */
function expand(text) {
  return text.replace(/\$\{?(\w+)\}?/g, (_, name) => {
    const value = process.env[name];
    if (value === undefined) throw new Error(`the environment variable ${name} is not set`);
    return value;
  });
}

/** @param {string} address */
function isLocal(address) {
  return address.replace(/^ipv4:/, "").split(",").every((one) => /^(unix:|127\.|localhost:)/.test(one));
}
