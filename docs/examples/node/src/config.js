/**
 * The configuration file: the same one as that of the Go gateway. Times are milliseconds, as everywhere in the contract.
 *
 * @typedef {object} Upstream
 * @property {string} base_url where one connection is reached
 * @property {Record<string, string>} [headers] carry its credential
 *
 * @typedef {object} Config
 * @property {string} path of the file
 * @property {string} listen host:port
 * @property {{address: string, ca_file: string, key: string, select_timeout_ms: number, report_timeout_ms: number}} policy
 *   where the service is: host:port, unix:PATH, or ipv4:HOST:PORT,HOST:PORT for several replicas; `ca_file` switches TLS on;
 *   `key` is the bearer key; the deadlines of the two calls, waiting in line not counted
 * @property {"open" | "closed"} fail_mode while the service is away: follow the last known order, or answer 503
 * @property {number} request_timeout_ms how long a client waits for its answer to begin: waits and attempts together
 * @property {number} first_byte_timeout_ms ends one attempt that does not answer
 * @property {number} idle_timeout_ms ends one attempt that falls silent
 * @property {number} drain_ms how long requests under way may take when the gateway is ended
 * @property {Record<string, string>} routes route of a model that clients name; a model that is not listed is its own route
 * @property {Record<string, Upstream>} upstreams by "provider/connection", every connection of the service's catalogue
 */
import { readFileSync } from "node:fs";
import { isIPv4 } from "node:net";

const DEFAULTS = {
  listen: "127.0.0.1:8080",
  fail_mode: "open",
  request_timeout_ms: 60_000,
  first_byte_timeout_ms: 30_000,
  idle_timeout_ms: 30_000,
  drain_ms: 10_000,
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

const UPSTREAM_FIELDS = ["base_url", "headers"];

/**
 * Names that no one would read: a misspelt fail_mode would quietly be the default.
 *
 * @param {any} given
 */
function* strange(given) {
  yield* strangeIn("", given, [...Object.keys(DEFAULTS), "policy"]);
  yield* strangeIn("policy: ", given.policy ?? {}, Object.keys(POLICY_DEFAULTS));
  for (const [name, upstream] of Object.entries(given.upstreams ?? {})) {
    yield* strangeIn(`upstreams.${name}: `, upstream, UPSTREAM_FIELDS);
  }
}

/** @param {string} place @param {unknown} given @param {string[]} known */
function strangeIn(place, given, known) {
  if (given === null || typeof given !== "object") return [`${place}not a JSON object`];
  const names = Object.keys(given).filter((name) => !known.includes(name));
  return names.map((name) => `${place}unknown field "${name}": known are ${known.join(", ")}`);
}

/**
 * Reads the file. $NAME in `policy.key` and in headers is replaced by the environment variable.
 *
 * @param {string} path
 * @returns {Config}
 * @throws {Error} with every problem of the file
 */
export function loadConfig(path) {
  const given = JSON.parse(textOf(path));
  if (given === null || typeof given !== "object") throw new Error("not a JSON object");
  /** @type {Config} */
  const config = { ...DEFAULTS, ...given, path, policy: { ...POLICY_DEFAULTS, ...given.policy } };
  const problems = [...strange(given)];
  if (problems.length === 0) problems.push(...problemsOf(config), ...expandAll(config));
  if (problems.length > 0) throw new Error(problems.join("; "));
  return config;
}

/** @param {string} path */
function textOf(path) {
  try {
    return readFileSync(path, "utf8");
  } catch (error) {
    const { code, message } = /** @type {NodeJS.ErrnoException} */ (error);
    const why = code === "ENOENT" ? "no such file" : message;
    throw new Error(`${why}: write it, or name another one with -config FILE`);
  }
}

/** @param {Config} config */
function* problemsOf(config) {
  if (!["open", "closed"].includes(config.fail_mode)) yield `fail_mode: "${config.fail_mode}" is neither open nor closed`;
  if (!hostAndPort(config.listen)) yield `listen: "${config.listen}" is not host:port`;
  for (const [name, value] of Object.entries({ ...config, ...config.policy })) {
    const isTime = name.endsWith("_ms");
    if (isTime && !(Number.isInteger(value) && Number(value) > 0)) yield `${name}: ${value} is no time in milliseconds`;
  }
  if (config.policy.key && !config.policy.ca_file && !isLocal(config.policy.address)) {
    yield "policy: a key goes to another host with ca_file only";
  }
  for (const [name, { base_url }] of Object.entries(config.upstreams)) {
    if (!URL.canParse(base_url) || !/^https?:$/.test(new URL(base_url).protocol)) {
      yield `upstreams.${name}: base_url "${base_url}" is no URL of http or https`;
    }
  }
}

/** Puts the variables in; header names in lower case. @param {Config} config */
function expandAll(config) {
  /** @type {string[]} */
  const missing = [];
  config.policy.key = expand(config.policy.key, missing);
  for (const upstream of Object.values(config.upstreams)) {
    const headers = Object.entries(upstream.headers ?? {});
    upstream.headers = Object.fromEntries(headers.map(([name, value]) => [name.toLowerCase(), expand(value, missing)]));
  }
  return missing.map((name) => `the environment variable ${name} is not set`);
}

/** @param {string} text @param {string[]} missing */
function expand(text, missing) {
  return text.replace(/\$\{?(\w+)\}?/g, (_, name) => {
    const value = process.env[name];
    if (value === undefined) missing.push(name);
    return value ?? "";
  });
}

/** Of host:port, or [host]:port for IPv6. @param {string} listen */
export function hostAndPort(listen) {
  const [, bare, bracketed, port] = /^(?:([^:[\]]*)|\[(.+)\]):(\d{1,5})$/.exec(listen) ?? [];
  return port === undefined ? undefined : { host: bracketed ?? bare, port: Number(port) };
}

/** Whether a key that goes there in plain text stays on this host. @param {string} address */
function isLocal(address) {
  const isOwn = (/** @type {string} */ one) => one.startsWith("unix:") || isLoopback(hostAndPort(one)?.host ?? "");
  return address.replace(/^ipv4:/, "").split(",").every(isOwn);
}

/** @param {string} host A name that begins with 127 is no address. */
function isLoopback(host) {
  return host === "localhost" || host === "::1" || (isIPv4(host) && host.startsWith("127."));
}
