// OpenAI's SDK for JavaScript.
import OpenAI from "openai";
import assert from "node:assert";

const { BASE_URL, MODEL } = process.env;
const client = new OpenAI({ baseURL: BASE_URL, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Why is the sky blue? Answer in one sentence." }];
const weather = {
  type: "object",
  properties: { city: { type: "string" }, unit: { type: "string", enum: ["C", "F"] } },
  required: ["city", "unit"],
  additionalProperties: false,
};
const tool = { type: "function", function: { name: "get_weather", parameters: weather } };

const checks = {
  async plain() {
    const answer = await client.chat.completions.create({ model: MODEL, messages, max_tokens: 20 });
    assert(answer.choices[0].message.content);
    assert(answer.usage.completion_tokens <= 20);
  },
  async stream() {
    const events = await client.chat.completions.create({
      model: MODEL, messages, max_tokens: 20, stream: true, stream_options: { include_usage: true },
    });
    let text = "", usage = null;
    for await (const chunk of events) {
      text += chunk.choices[0]?.delta?.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert(text && usage.completion_tokens > 0);
  },
  async suffix() {
    const answer = await client.completions.create({
      model: MODEL, prompt: "def add(a, b):\n    ", suffix: "\n\nprint(add(1, 2))\n",
      max_tokens: 16, temperature: 0,
    });
    assert(answer.choices[0].text.includes("return"));
  },
  async models() {
    const names = [];
    for await (const model of client.models.list()) names.push(model.id);
    assert(names.includes(MODEL));
  },
  async logprobs() {
    const answer = await client.chat.completions.create({
      model: MODEL, messages, max_tokens: 3, logprobs: true, top_logprobs: 2,
    });
    for (const token of answer.choices[0].logprobs.content) {
      assert(token.logprob <= 0 && token.top_logprobs.length === 2);
    }
  },
  async tools() {
    const answer = await client.chat.completions.create({
      model: MODEL, messages: [{ role: "user", content: "What is the weather in Paris?" }],
      tools: [tool], tool_choice: "required", parallel_tool_calls: false, temperature: 0,
      max_tokens: 100,
    });
    const [call] = answer.choices[0].message.tool_calls;
    assert.deepEqual(Object.keys(JSON.parse(call.function.arguments)), ["city", "unit"]);
    assert.equal(answer.choices[0].finish_reason, "tool_calls");
  },
  async streamedTools() {
    const stream = client.chat.completions.stream({
      model: MODEL, messages: [{ role: "user", content: "What is the weather in Paris?" }],
      tools: [tool], tool_choice: "required", parallel_tool_calls: false, temperature: 0,
      max_tokens: 100,
    });
    const answer = await stream.finalChatCompletion();
    JSON.parse(answer.choices[0].message.tool_calls[0].function.arguments);
  },
  async jsonSchema() {
    const answer = await client.chat.completions.create({
      model: MODEL, messages, max_tokens: 60, temperature: 0,
      response_format: { type: "json_schema", json_schema: { name: "w", schema: weather } },
    });
    assert(["stop", "length"].includes(answer.choices[0].finish_reason));
  },
  async errors() {
    await assert.rejects(
      client.chat.completions.create({ model: MODEL, messages, temperature: -1 }),
      (error) => error instanceof OpenAI.BadRequestError && Boolean(error.message),
    );
    await assert.rejects(
      client.chat.completions.create({ model: "nobody", messages }), OpenAI.NotFoundError,
    );
  },
  async cancel() {
    const events = await client.chat.completions.create({
      model: MODEL, messages, max_tokens: 2000, stream: true,
    });
    for await (const _ of events) break;
    events.controller.abort();
    await checks.plain();
  },
};

let failed = 0;
for (const [name, check] of Object.entries(checks)) {
  try {
    await check();
    console.log(`  ok ${name}`);
  } catch (error) {
    failed += 1;
    console.log(`  FAILED ${name}`, error);
  }
}
process.exit(failed ? 1 : 0);
