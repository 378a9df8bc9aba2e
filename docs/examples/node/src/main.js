/**
 * A small gateway that lets the policy service decide: `model` of the request names the route, the service names the target,
 * and the answer of the target's upstream goes back.
 *
 *     node src/main.js -config gateway.json
 *
 * The file may also stand by itself, and gateway.json is what is read where none is named.
 *
 * Exit codes: 0 ended by a signal, 1 it cannot listen, 2 the configuration cannot be used.
 */
import { loadConfig } from "./config.js";
import { Gateway } from "./gateway.js";

const CANNOT_LISTEN = 1;
const CANNOT_BE_USED = 2;

/** Ends with a line that names the remedy instead of a stack trace. @param {number} code @param {string} text */
function end(code, text) {
  console.error(`gateway: ${text}`);
  process.exit(code);
}

/** The configuration file that the command line names. @param {string[]} words */
function fileOf(words) {
  const isNamed = /^--?config$/.test(words[0] ?? "");
  const [path = isNamed ? words[0] : "gateway.json", ...left] = isNamed ? words.slice(1) : words;
  const [strange] = path.startsWith("-") ? [path] : left;
  if (strange) end(CANNOT_BE_USED, `"${strange}" is not understood: say FILE or -config FILE, and nothing else`);
  return path;
}

/** @param {string} path */
function configured(path) {
  try {
    return new Gateway(loadConfig(path));
  } catch (error) {
    return end(CANNOT_BE_USED, `${path}: ${/** @type {Error} */ (error).message}`);
  }
}

/** @param {any} error */
function whyNot({ code, message }) {
  if (code === "EADDRINUSE") return "the address is in use: end what listens there, or change `listen`";
  return `${message}: change \`listen\``;
}

const gateway = /** @type {Gateway} */ (configured(fileOf(process.argv.slice(2))));
await gateway.listen().catch((error) => {
  end(CANNOT_LISTEN, `cannot listen on ${gateway.config.listen}: ${whyNot(error)}`);
});
for (const signal of ["SIGTERM", "SIGINT"]) {
  process.once(signal, async () => {
    await gateway.close();
    process.exit(0);
  });
}
