// The tools that a model may call: an editor for their list.

import { h } from "../shared/dom.js";
import { checkedField } from "./checked.js";
import { readTools, toolFields } from "./settings.js";

const EXAMPLE = [
  {
    type: "function",
    function: {
      name: "weather",
      description: "The weather in a city now",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false },
    },
  },
];

/** Return the editor's element. */
export function toolsEditor(settings, model, onChange) {
  const field = {
    id: "tools", label: "Functions, as JSON", rows: 6, text: settings.tools,
    hint: '[{"name": "weather", "parameters": {…}}]', example: JSON.stringify(EXAMPLE, null, 2),
  };
  const act = {
    put: (text) => {
      settings.tools = text;
      onChange();
    },
    read: () => toolFields(settings, true),
    toTry: () => {
      const messages = [{ role: "user", content: "x" }];
      return { path: "v1/chat/completions", body: { model: model(), messages, max_tokens: 1, temperature: 0, ...toolFields(settings, true) } };
    },
    tidy: () => JSON.stringify(readTools(settings.tools), null, 2),
  };
  return h("div.form-editor", {}, checkedField(field, act));
}
