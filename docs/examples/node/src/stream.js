/** Errors inside answers that call themselves a success. */

const MAX_LINE_BYTES = 64 * 1024;
const NEWLINE = 0x0a;

/** Looks for error events in server-sent events, chunk by chunk. */
export class EventScanner {
  /** @type {Buffer[]} */
  #line = [];
  #length = 0;
  /** Data lines so far. */
  seen = 0;
  /** @type {Buffer | undefined} the first error event */
  failure;

  /** @param {Buffer} chunk */
  write(chunk) {
    let start = 0;
    for (let end = chunk.indexOf(NEWLINE); end >= 0; end = chunk.indexOf(NEWLINE, start)) {
      this.#add(chunk.subarray(start, end));
      this.#judge(Buffer.concat(this.#line).toString().trim());
      this.#line = [];
      this.#length = 0;
      start = end + 1;
    }
    this.#add(chunk.subarray(start));
  }

  /** @param {Buffer} part */
  #add(part) {
    this.#length += part.length;
    if (this.#length <= MAX_LINE_BYTES) this.#line.push(part);
  }

  /** @param {string} line */
  #judge(line) {
    if (!line.startsWith("data:")) return;
    this.seen += 1;
    const data = line.slice("data:".length).trim();
    if (!this.failure && isError(data)) this.failure = Buffer.from(data);
  }
}

/** The JSON is an error object of OpenAI, Anthropic or Gemini. @param {string} text */
function isError(text) {
  if (!/error|failed/.test(text)) return false; // most events end here, unparsed
  try {
    const { type, error } = JSON.parse(text) ?? {};
    return Boolean(error) || type === "error" || type === "response.failed";
  } catch {
    return false;
  }
}

/**
 * A whole 2xx answer that is none: empty, without an event, a web page, or an error object.
 *
 * @param {Buffer} body
 * @param {boolean} isStream
 */
export function hidesFailure(body, isStream) {
  const text = body.toString().trim();
  return isStream ? !text.includes("data:") : text === "" || text.startsWith("<") || isError(text);
}
