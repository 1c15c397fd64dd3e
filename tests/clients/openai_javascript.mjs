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
  async embeddings() {
    const input = ["The cat sleeps.", "A kitten naps."];
    const answer = await client.embeddings.create({ model: MODEL, input }); // in base64
    const plain = await client.embeddings.create({ model: MODEL, input, encoding_format: "float" });
    assert.deepEqual(
      answer.data.map((one) => one.embedding),
      plain.data.map((one) => one.embedding.map(Math.fround)),
    );
    const [{ embedding }] = (
      await client.embeddings.create({ model: MODEL, input, dimensions: 32 })
    ).data;
    assert.equal(embedding.length, 32);
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
  async responses() {
    const asked = { model: MODEL, max_output_tokens: 20, temperature: 0 };
    const answer = await client.responses.create({ input: messages, ...asked });
    assert(answer.output_text && answer.usage.output_tokens <= 20);
    const more = await client.responses.create({
      input: "And at night?", previous_response_id: answer.id, ...asked,
    });
    const said = [];
    for await (const item of client.responses.inputItems.list(more.id, { order: "asc", limit: 2 })) {
      said.push(item.role);
    }
    assert.deepEqual(said, ["user", "assistant", "user"]);
    assert.deepEqual((await client.responses.retrieve(answer.id)).output, answer.output);
    await client.responses.delete(answer.id);
    await assert.rejects(client.responses.retrieve(answer.id), OpenAI.NotFoundError);
  },
  async streamedResponses() {
    const asked = { model: MODEL, input: messages, max_output_tokens: 20, temperature: 0 };
    let text = "", last = null, count = 0;
    for await (const event of await client.responses.create({ stream: true, ...asked })) {
      assert.equal(event.sequence_number, count++);
      if (event.type === "response.output_text.delta") text += event.delta;
      last = event;
    }
    assert.equal(last.response.output[0].content[0].text, text);
    const stream = client.responses.stream(asked);
    assert.equal((await stream.finalResponse()).output_text, text);
  },
  async toolsInResponses() {
    const asked = {
      model: MODEL, input: "What is the weather in Paris?", temperature: 0, max_output_tokens: 100,
      tools: [{ type: "function", name: "get_weather", parameters: weather, strict: true }],
      tool_choice: { type: "function", name: "get_weather" },
    };
    const [call] = (await client.responses.create(asked)).output;
    assert.deepEqual(Object.keys(JSON.parse(call.arguments)), ["city", "unit"]);
    const [streamed] = (await client.responses.stream(asked).finalResponse()).output;
    assert.equal(streamed.arguments, call.arguments);
  },
  async formsInResponses() {
    const answer = await client.responses.create({
      model: MODEL, input: messages, max_output_tokens: 60, temperature: 0,
      text: { format: { type: "json_schema", name: "w", schema: weather, strict: true } },
    });
    assert(answer.output_text.startsWith("{"));
    if (answer.status === "completed") JSON.parse(answer.output_text);
  },
  async errorsOfResponses() {
    await assert.rejects(
      client.responses.create({ model: MODEL, input: "x", previous_response_id: "resp_0" }),
      (error) => error instanceof OpenAI.BadRequestError
        && error.code === "previous_response_not_found",
    );
    await assert.rejects(
      client.responses.create({ model: MODEL, input: "x", tool_choice: { type: "web_search" } }),
      (error) => error instanceof OpenAI.BadRequestError && error.param === "tool_choice.type",
    );
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
