// Colours code a little: comments, strings, numbers and the common languages' keywords.

import { h } from "../shared/dom.js";

const MAX_CHARACTERS = 50_000;

const KEYWORDS = new Set(
  ("abstract and as async await bool boolean break case catch char class const continue crate def default defer del do double elif else end enum " +
    "except export extends extern false False final finally float fn for foreach from func function global go goto if impl implements import in " +
    "int interface is lambda let long match mod module move mut namespace new nil None nonlocal not null operator or package pass private " +
    "protected pub public raise return self Self short signed sizeof static str string struct super switch template then this throw trait true True " +
    "try type typedef typename typeof undefined unsafe unsigned use using var virtual void volatile when where while with yield " +
    "SELECT FROM WHERE INSERT INTO UPDATE DELETE CREATE TABLE JOIN LEFT RIGHT ON GROUP BY ORDER LIMIT AND OR NOT NULL VALUES SET").split(" "),
);

const HASH_COMMENTS = /^(?:py|python|python3|sh|bash|shell|zsh|console|rb|ruby|yaml|yml|toml|make|makefile|dockerfile|perl|r|julia|ini|conf|cmake)$/i;
const DASH_COMMENTS = /^(?:sql|lua|haskell|hs|elm|ada)$/i;
const PLAIN = /^(?:text|txt|plain|plaintext|markdown|md|output|log|)$/i;

const STRING = /"""[\s\S]*?(?:"""|$)|'''[\s\S]*?(?:'''|$)|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'|`(?:\\.|[^`\\])*`?/;
const NUMBER = /\b(?:0[xXbBoO][\da-fA-F_]+|\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?)\b/;
const WORD = /[A-Za-z_$][\w$]*/;
const SLASHES = /\/\/[^\n]*|\/\*[\s\S]*?(?:\*\/|$)/;

/** Return the nodes of a piece of code. */
export function paint(text, language) {
  if (PLAIN.test(language) || text.length > MAX_CHARACTERS) return [text];
  const pattern = new RegExp(`(${commentOf(language)})|(${STRING.source})|(${NUMBER.source})|(${WORD.source})`, "g");
  const nodes = [];
  let end = 0;
  for (const found of text.matchAll(pattern)) {
    const kind = kindOf(found);
    if (!kind) continue;
    nodes.push(text.slice(end, found.index), h(`span.${kind}`, {}, found[0]));
    end = found.index + found[0].length;
  }
  nodes.push(text.slice(end));
  return nodes;
}

function commentOf(language) {
  if (HASH_COMMENTS.test(language)) return "#[^\\n]*";
  if (DASH_COMMENTS.test(language)) return "--[^\\n]*";
  if (/^(?:html|xml|svg)$/i.test(language)) return "<!--[\\s\\S]*?(?:-->|$)";
  return SLASHES.source;
}

function kindOf([, comment, string, number, word]) {
  if (comment) return "hl-comment";
  if (string) return "hl-string";
  if (number) return "hl-number";
  return word && KEYWORDS.has(word) ? "hl-keyword" : null;
}
