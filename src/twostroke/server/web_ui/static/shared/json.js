// Finds where a text stops being JSON, which browsers' own messages do not all tell.

const BLANK = /[ \t\n\r]*/y;
const SCALAR = /"(?:[^"\\\u0000-\u001f]|\\(?:["\\/bfnrt]|u[\da-fA-F]{4}))*"|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null/y;
const STRING = /"(?:[^"\\\u0000-\u001f]|\\(?:["\\/bfnrt]|u[\da-fA-F]{4}))*"/y;

/** Return what is wrong with a text that is no JSON: "line 2, column 11", or that it ends too early. */
export function whereBroken(text) {
  const end = firstFault(text);
  if (end >= text.length) return "it ends too early";
  const before = text.slice(0, end).split("\n");
  return `look at line ${before.length}, column ${before.at(-1).length + 1}`;
}

/** Walk through the text with a stack of open brackets; return where it cannot go on. */
function firstFault(text) {
  const open = [];
  let at = 0;
  let wants = "value"; // value, first (a value or the end), key, firstKey, colon, next
  const eat = (pattern) => {
    pattern.lastIndex = at;
    const found = pattern.exec(text);
    if (found) at = pattern.lastIndex;
    return found !== null;
  };
  for (;;) {
    eat(BLANK);
    const letter = text[at];
    if (at >= text.length || (wants === "next" && !open.length)) return at;
    if ((wants === "value" || wants === "first") && (letter === "{" || letter === "[")) {
      open.push(letter);
      wants = letter === "{" ? "firstKey" : "first";
      at += 1;
    } else if (isEnd(letter, open.at(-1)) && ["first", "firstKey", "next"].includes(wants)) {
      open.pop();
      wants = "next";
      at += 1;
    } else if (wants === "value" || wants === "first") {
      if (!eat(SCALAR)) return at;
      wants = "next";
    } else if (wants === "key" || wants === "firstKey") {
      if (!eat(STRING)) return at;
      wants = "colon";
    } else if (letter === (wants === "colon" ? ":" : ",")) {
      wants = wants === "colon" || open.at(-1) === "[" ? "value" : "key";
      at += 1;
    } else return at;
  }
}

function isEnd(letter, open) {
  return (letter === "}" && open === "{") || (letter === "]" && open === "[");
}
