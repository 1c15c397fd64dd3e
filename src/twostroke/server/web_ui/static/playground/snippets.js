// A request as a command or a program that makes the same one.

/**
 * Return `[{name, language, text}]`. `base` is the server's address, without a slash at the end.
 *
 * With `hasKey` they send one out of the environment: the user's own would be taken along.
 */
export function snippets(base, path, body, hasKey) {
  return [
    { name: "curl", language: "sh", text: curl(base, path, body, hasKey) },
    { name: "Python", language: "python", text: python(base, body, hasKey) },
    { name: "JSON", language: "json", text: JSON.stringify(body, null, 2) },
  ];
}

function curl(base, path, body, hasKey) {
  const json = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  const key = hasKey ? '  -H "Authorization: Bearer $TWOSTROKE_API_KEY" \\\n' : "";
  return `curl -N ${base}/${path} \\\n  -H 'Content-Type: application/json' \\\n${key}  -d '${json}'`;
}

// What the client of OpenAI takes as arguments of its own; everything else goes into extra_body.
const KNOWN = new Set([
  "model", "messages", "prompt", "stream", "stream_options", "temperature", "top_p", "n", "seed", "stop", "max_tokens",
  "presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs", "response_format", "tools",
  "tool_choice", "parallel_tool_calls", "prediction", "echo", "suffix", "user", "service_tier",
]);

function python(base, body, hasKey) {
  const isChat = "messages" in body;
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => !KNOWN.has(name)));
  const own = Object.entries(body).filter(([name]) => KNOWN.has(name));
  const lines = own.map(([name, value]) => `    ${name}=${literal(value, 4)},`);
  if (Object.keys(extra).length) lines.push(`    extra_body=${literal(extra, 4)},`);
  const key = hasKey ? 'os.environ["TWOSTROKE_API_KEY"]' : '"none"';
  return `${hasKey ? "import os\n\n" : ""}from openai import OpenAI  # pip install openai

client = OpenAI(base_url=${literal(`${base}/v1`)}, api_key=${key})
stream = client.${isChat ? "chat.completions" : "completions"}.create(
${lines.join("\n")}
)
for chunk in stream:
    for choice in chunk.choices:
        print(choice.${isChat ? 'delta.content or ""' : "text"}, end="", flush=True)
print()
`;
}

/** Return a JSON value as Python writes it. */
function literal(value, indent = 0) {
  if (value === true) return "True";
  if (value === false) return "False";
  if (value === null) return "None";
  if (typeof value !== "object") return JSON.stringify(value);
  const inner = " ".repeat(indent + 4);
  const isList = Array.isArray(value);
  const parts = isList
    ? value.map((one) => literal(one, indent + 4))
    : Object.entries(value).map(([key, one]) => `${JSON.stringify(key)}: ${literal(one, indent + 4)}`);
  const [open, close] = isList ? "[]" : "{}";
  const short = open + parts.join(", ") + close;
  if (short.length + indent <= 88 && !short.includes("\n")) return short;
  return `${open}\n${parts.map((part) => `${inner}${part},\n`).join("")}${" ".repeat(indent)}${close}`;
}
