// Ollama's package for JavaScript, with its ordinary calls.
import assert from "node:assert";
import { Ollama } from "ollama";

const { ROOT_URL, MODEL } = process.env;
const client = new Ollama({ host: ROOT_URL });
const messages = [{ role: "user", content: "Why is the sky blue? Answer in one sentence." }];
const options = { num_predict: 20, temperature: 0 };
// JSON allows these characters raw in strings; readers of lines must not split there.
const separators = ["a\u2028b", "a\u2029b", "a\u0085b"];

async function gather(stream) {
  const parts = [];
  for await (const part of stream) parts.push(part);
  assert(parts.at(-1).done);
  return parts;
}

const checks = {
  async chat() {
    const answer = await client.chat({ model: MODEL, messages, options });
    assert(answer.message.content);
    const parts = await gather(await client.chat({ model: MODEL, messages, options, stream: true }));
    assert.equal(parts.map((part) => part.message.content).join(""), answer.message.content);
  },
  async generate() {
    const request = { model: MODEL, prompt: "The capital of France is", raw: true, options };
    const answer = await client.generate(request);
    const parts = await gather(await client.generate({ ...request, stream: true }));
    assert.equal(parts.map((part) => part.response).join(""), answer.response);
  },
  async logprobs() {
    const request = { model: MODEL, messages, options, logprobs: true, top_logprobs: 3 };
    const answer = await client.chat(request);
    assert([0, 1].includes(answer.eval_count - answer.logprobs.length)); // the end token has none
    assert.equal(answer.logprobs[0].top_logprobs.length, 3);
  },
  async separators() {
    const properties = { text: { const: separators.join("") } };
    const format = { type: "object", properties, required: ["text"] };
    const parts = await gather(await client.chat({ model: MODEL, messages, format, stream: true }));
    const text = parts.map((part) => part.message.content).join("");
    assert.equal(JSON.parse(text).text, separators.join(""));
  },
  async tools() {
    const parameters = { type: "object", properties: { city: { type: "string" } } };
    const tools = [{ type: "function", function: { name: "get_weather", parameters } }];
    const answer = await client.chat({ model: MODEL, messages, tools, options });
    assert.equal(answer.message.role, "assistant");
  },
  async embed() {
    const { embeddings } = await client.embed({ model: MODEL, input: ["one", "two"] });
    assert.equal(embeddings.length, 2);
    const { embedding } = await client.embeddings({ model: MODEL, prompt: "one" });
    assert.equal(embedding.length, embeddings[0].length);
  },
  async models() {
    assert((await client.list()).models.length);
    assert((await client.ps()).models.length);
    assert((await client.show({ model: MODEL })).details.family);
    assert.equal((await client.pull({ model: MODEL })).status, "success");
    assert((await client.version()).version);
  },
  async errors() {
    await assert.rejects(client.chat({ model: "nobody", messages }), /not found/);
    const stream = await client.chat({ model: MODEL, messages, stream: true });
    setTimeout(() => stream.abort(), 50);
    await assert.rejects(gather(stream), /abort/i);
  },
};

let failed = 0;
for (const [name, check] of Object.entries(checks)) {
  try {
    await check();
    console.log(`  ok    ${name}`);
  } catch (error) {
    failed += 1;
    console.log(`  FAIL  ${name}: ${error.stack}`);
  }
}
process.exit(failed ? 1 : 0);
