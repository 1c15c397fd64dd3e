// The Vercel AI SDK, through each of its providers that can reach us.

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import assert from "node:assert/strict";
import { z } from "zod";

const { BASE_URL, MODEL } = process.env;
const reached = { baseURL: BASE_URL, apiKey: "none" };
const openai = createOpenAI(reached);
const MODELS = {
  compatible: createOpenAICompatible({ name: "ours", supportsStructuredOutputs: true, includeUsage: true, ...reached })(MODEL),
  "openai chat": openai.chat(MODEL),
  "openai responses": openai.responses(MODEL),
  anthropic: createAnthropic(reached)(MODEL),
};

const weather = z.object({ city: z.string().max(40), degrees: z.number().int().min(-90).max(60) });
const report = Output.object({ schema: weather });
let asked = 0; // how often the tool ran
const tools = {
  get_weather: tool({
    description: "The weather in a city now.",
    inputSchema: z.object({ city: z.string().max(40) }),
    execute: async ({ city }) => {
      asked += 1;
      return { city, degrees: 17 };
    },
  }),
};
const QUESTION = "What is the weather in Paris now?";
const FORMS = {
  text: { prompt: "Why is the sky blue? Answer in one sentence.", maxOutputTokens: 20 },
  "a tool": { prompt: QUESTION, tools },
  "a form": { prompt: "In Paris it is 17 degrees.", output: report },
  "a tool and a form": { prompt: QUESTION, tools, output: report },
};

async function check(model, request, streamed) {
  asked = 0;
  const call = { model, temperature: 0, maxOutputTokens: 200, maxRetries: 0, stopWhen: stepCountIs(4), ...request };
  // A small model calls again and again if it may.
  if (request.tools) call.prepareStep = () => (asked ? { toolChoice: "none" } : {});
  let answer;
  if (streamed) {
    answer = streamText({ ...call, onError: ({ error }) => { throw error; } });
    const kinds = new Set();
    for await (const part of answer.fullStream) {
      if (part.type === "error") throw part.error;
      kinds.add(part.type);
    }
    assert(kinds.has("finish"));
  } else {
    answer = await generateText(call);
  }
  if (request.tools) assert(asked > 0, "the tool did not run");
  if (request.output) weather.parse(await answer.output);
  else assert(await answer.text);
  assert((await answer.usage).outputTokens > 0);
}

let failed = 0;
for (const [provider, model] of Object.entries(MODELS))
  for (const [form, request] of Object.entries(FORMS))
    for (const streamed of [false, true]) {
      const name = `${provider}: ${form}${streamed ? ", streamed" : ""}`;
      try {
        await check(model, request, streamed);
        console.log(`  ok ${name}`);
      } catch (error) {
        failed += 1;
        console.log(`  FAILED ${name}: ${error.stack}`, error.responseBody ?? "");
      }
    }
process.exit(failed ? 1 : 0);
