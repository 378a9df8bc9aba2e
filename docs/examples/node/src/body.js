/** The body of a request as its client wrote it: members that the gateway does not change keep every digit of their numbers. */

/**
 * The members of a JSON object, each as its text.
 *
 * @param {string} text of a valid JSON object
 * @returns {Map<string, string>}
 */
export function membersOf(text) {
  const members = new Map();
  let place = text.indexOf("{") + 1;
  for (;;) {
    const name = text.indexOf('"', place);
    if (name < 0) return members;
    const nameEnd = endOfString(text, name);
    const start = text.indexOf(":", nameEnd) + 1;
    const end = endOfValue(text, start);
    members.set(JSON.parse(text.slice(name, nameEnd)), text.slice(start, end).trim());
    place = end;
  }
}

/** Where the value ends: at the comma or brace behind it. @param {string} text @param {number} start */
function endOfValue(text, start) {
  let depth = 0;
  for (let place = start; ; place += 1) {
    const letter = text[place];
    if (letter === '"') place = endOfString(text, place) - 1;
    else if (letter === "{" || letter === "[") depth += 1;
    else if (depth === 0 && (letter === "," || letter === "}")) return place;
    else if (letter === "}" || letter === "]") depth -= 1;
  }
}

/** Behind the closing quote: the first one with an even number of backslashes before it. @param {string} text @param {number} start */
function endOfString(text, start) {
  for (let quote = text.indexOf('"', start + 1); ; quote = text.indexOf('"', quote + 1)) {
    let before = quote;
    while (text[before - 1] === "\\") before -= 1;
    if ((quote - before) % 2 === 0) return quote + 1;
  }
}

/** @param {Map<string, string>} members */
export function textOf(members) {
  return `{${[...members].map(([name, value]) => `${JSON.stringify(name)}:${value}`).join(",")}}`;
}
