// The settings of a request: what there is, what it is called, and which values it may have.

import { whereBroken } from "../shared/json.js";

/**
 * One row a setting. `kind` is how it is entered; values are kept as they are typed, so that a half
 * typed number is no error, and an empty one leaves the field out of the request.
 */
export const FIELDS = [
  { name: "system", label: "System prompt", kind: "text", start: "", rows: 3, hint: "Instructions for the model" },

  { name: "temperature", label: "Temperature", kind: "number", start: "", min: 0, max: 2, step: 0.1, hint: "model default" },
  { name: "max_tokens", label: "Max tokens", kind: "integer", start: "1024", min: 1, step: 64, hint: "no limit" },
  { name: "top_p", label: "Top p", kind: "number", start: "", min: 0, max: 1, step: 0.05, hint: "model default" },
  { name: "top_k", label: "Top k", kind: "integer", start: "", min: 0, step: 10, hint: "model default" },
  { name: "min_p", label: "Min p", kind: "number", start: "", min: 0, max: 1, step: 0.05, hint: "model default" },
  { name: "seed", label: "Seed", kind: "integer", start: "", step: 1, hint: "random" },

  { name: "presence_penalty", label: "Presence penalty", kind: "number", start: "", min: -2, max: 2, step: 0.1, hint: "0" },
  { name: "frequency_penalty", label: "Frequency penalty", kind: "number", start: "", min: -2, max: 2, step: 0.1, hint: "0" },
  { name: "repetition_penalty", label: "Repetition penalty", kind: "number", start: "", min: 0, step: 0.05, hint: "model default" },
  { name: "n", label: "Completions (n)", kind: "integer", start: "", min: 1, max: 8, step: 1, hint: "1" },
  {
    name: "speculate", label: "Speculative decoding", kind: "choice", start: "",
    options: [["", "default"], ["off", "off"], ["auto", "auto"], ["ngram", "ngram"], ["lookahead", "lookahead"], ["draft", "draft"], ["eagle", "eagle"], ["medusa", "medusa"], ["mtp", "mtp"]],
  },
  {
    name: "service_tier", label: "Service tier", kind: "choice", start: "",
    options: [["", "default"], ["priority", "priority"], ["flex", "flex"]],
  },
  { name: "stop", label: "Stop strings, one per line", kind: "text", start: "", rows: 2, hint: "" },
  { name: "logprobs", label: "Log probabilities", kind: "switch", start: false },

  {
    name: "form", label: "Response format", kind: "choice", start: "",
    options: [["", "any text"], ["json_object", "JSON object"], ["json_schema", "JSON schema"], ["regex", "regular expression"], ["choice", "one of several texts"], ["grammar", "grammar"]],
  },
  { name: "form_json_schema", kind: "form", start: "" },
  { name: "form_regex", kind: "form", start: "" },
  { name: "form_choice", kind: "form", start: "" },
  { name: "form_grammar", kind: "form", start: "" },

  { name: "tools", label: "Tools", kind: "tools", start: "", rows: 9 },
  {
    name: "tool_choice", label: "Tool choice", kind: "choice", start: "", isWide: true,
    options: [["", "auto"], ["required", "required, until results are sent"], ["none", "none"]],
  },
  { name: "parallel_tool_calls", label: "Parallel tool calls", kind: "switch", start: true },

  { name: "extra", label: "Additional request fields", kind: "text", start: "", rows: 3, isCode: true, hint: '{"logit_bias": {"42": -100}}' },
];

const OF_THEIR_OWN = new Set(["form", "tool_choice"]); // what they mean depends on other settings

/** Settings as they are at first; texts that go on would go on for long. */
export function defaultSettings(kind = "chat") {
  const settings = Object.fromEntries(FIELDS.map(({ name, start }) => [name, start]));
  if (kind === "text") settings.max_tokens = "200";
  return settings;
}

/** Whether nobody has changed anything yet. */
export function isUntouched(settings, kind) {
  const start = defaultSettings(kind);
  return FIELDS.every(({ name }) => settings[name] === start[name]);
}

/**
 * Return what the settings mean in a request of either kind; `toolFields` has what only chats have.
 *
 * Throws an Error with a sentence for the user where one cannot be meant.
 */
export function toFields(settings) {
  const fields = {};
  for (const field of FIELDS) {
    const typed = settings[field.name];
    if (field.kind === "number" || field.kind === "integer") {
      if (typed.trim() !== "") fields[field.name] = readNumber(field, typed);
    } else if (field.kind === "choice" && !OF_THEIR_OWN.has(field.name) && typed) {
      fields[field.name] = typed;
    }
  }
  const stops = settings.stop.split("\n").filter((line) => line !== "").map(unescapeStop);
  if (stops.length) fields.stop = stops;
  return { ...fields, ...formFields(settings), ...extraFields(settings.extra) };
}

function readNumber({ label, kind, min = -Infinity, max = Infinity }, typed) {
  const number = Number(typed);
  if (!Number.isFinite(number)) throw new Error(`${label}: “${typed}” is no number.`);
  if (kind === "integer" && !Number.isSafeInteger(number)) throw new Error(`${label} must be a whole number.`);
  if (number < min) throw new Error(`${label} must be at least ${min}.`);
  if (number > max) throw new Error(`${label} must be at most ${max}.`);
  return number;
}

/** A line break in a stop string is written \n, as a line of the field is a string of its own. */
function unescapeStop(line) {
  return line.replaceAll(/\\([nt\\])/g, (_, letter) => ({ n: "\n", t: "\t", "\\": "\\" })[letter]);
}

/** Return the fields that say what the answer has to look like. */
export function formFields(settings) {
  const typed = settings[`form_${settings.form}`]?.trim() ?? "";
  if (settings.form === "") return {};
  if (settings.form === "json_object") return { response_format: { type: "json_object" } };
  if (typed === "") throw new Error("Enter the response format in the settings, or choose “any text”.");
  if (settings.form === "json_schema") {
    const schema = readObject(typed, "The schema");
    return { response_format: { type: "json_schema", json_schema: { name: "answer", schema } } };
  }
  if (settings.form === "choice") {
    const texts = typed.split("\n").map((line) => line.trim()).filter((line) => line !== "");
    return { guided_choice: texts };
  }
  return { [`guided_${settings.form}`]: settings[`form_${settings.form}`] };
}

/**
 * Return the fields that offer tools; `isFirst` tells that the turn has no results yet.
 *
 * A model that had to call again after each result would never answer.
 */
export function toolFields(settings, isFirst) {
  if (settings.tools.trim() === "") return {};
  const fields = { tools: readTools(settings.tools) };
  if (settings.tool_choice === "none" || (settings.tool_choice && isFirst)) fields.tool_choice = settings.tool_choice;
  if (!settings.parallel_tool_calls) fields.parallel_tool_calls = false;
  return fields;
}

/** Return the list of tools that a text spells: one function or several, bare or as requests have them. */
export function readTools(typed) {
  const value = readJson(typed, "The list of tools");
  return (Array.isArray(value) ? value : [value]).map((tool, index) => {
    const found = tool?.function ?? tool;
    if (typeof found?.name !== "string" || found.name === "") throw new Error(`Tool ${index + 1} needs a “name”.`);
    return tool.function ? tool : { type: "function", function: tool };
  });
}

function extraFields(typed) {
  return typed.trim() === "" ? {} : readObject(typed, "“Further fields”");
}

/** Return the JSON object that a text spells, or throw an Error that says where it goes wrong. */
export function readObject(typed, what) {
  const value = readJson(typed, what);
  if (value === null || typeof value !== "object" || Array.isArray(value)) {
    throw new Error(`${what} must be a JSON object.`);
  }
  return value;
}

function readJson(typed, what) {
  try {
    return JSON.parse(typed);
  } catch {
    throw new Error(`${what} is not JSON: ${whereBroken(typed)}.`);
  }
}
