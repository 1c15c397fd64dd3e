// Schemas as zod makes them, through the Vercel AI SDK: each is answered, and the answer parses.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject } from "ai";
import { z } from "zod";

const { BASE_URL, MODEL } = process.env;
// This provider sends schemas whole; that of OpenAI leaves out what OpenAI's own server refuses.
const reached = { name: "ours", baseURL: BASE_URL, apiKey: "none", supportsStructuredOutputs: true };
const model = createOpenAICompatible(reached)(MODEL);

const short = z.string().max(12);
const count = z.number().int().min(0).max(99);
const person = z.object({ name: short, age: count });
const cat = z.object({ kind: z.literal("cat"), lives: z.number().int().min(1).max(9) });
const dog = z.object({ kind: z.literal("dog"), name: short });
const tree = z.object({
  label: short,
  get children() {
    return z.array(tree).max(1);
  },
});
const list = z.object({ head: count, tail: z.lazy(() => list.nullable()) });
const Colour = { Red: "red", Green: "green" };

const CONSTRUCTS = {
  string: short,
  "a string of at least and at most": z.string().min(3).max(8),
  "a string of a length": z.string().length(4),
  "a regular expression": z.string().regex(/^[A-Z]{2}-\d{3}$/),
  "two regular expressions": z.string().regex(/^[a-z]{1,8}$/).regex(/^[a-m]+$/),
  "begins with": z.string().startsWith("id_").max(10),
  "ends with": z.string().max(10).endsWith(".py"),
  contains: z.string().max(10).includes("-"),
  "lower case": z.string().max(8).lowercase(),
  "upper case": z.string().max(8).uppercase(),
  email: z.email().max(40),
  url: z.url().max(60),
  uuid: z.uuid(),
  "uuid of version 4": z.uuidv4(),
  "a date": z.iso.date(),
  "a time": z.iso.time(),
  "a date and time": z.iso.datetime(),
  "a time with an offset": z.iso.datetime({ offset: true }),
  duration: z.iso.duration(),
  ipv4: z.ipv4(),
  ipv6: z.ipv6(),
  "a range of addresses": z.cidrv4(),
  base64: z.base64().max(12),
  base64url: z.base64url().max(12),
  jwt: z.string().regex(/^[A-Za-z0-9_-]{1,6}\.[A-Za-z0-9_-]{1,6}\.[A-Za-z0-9_-]{1,6}$/),
  cuid2: z.cuid2().max(24),
  ulid: z.ulid(),
  nanoid: z.nanoid(),
  emoji: z.enum(["🙂", "🙁"]),
  e164: z.e164(),
  number: z.number().min(-1000).max(1000),
  integer: z.int(),
  "an integer of 32 bits": z.int32(),
  "a positive integer": z.number().int().positive().max(1e6),
  "not negative": z.number().nonnegative().lt(10),
  "a multiple": z.number().multipleOf(5).min(0).max(100),
  "a big integer as text": z.string().regex(/^-?\d{1,15}$/).transform(BigInt),
  "a number as text": z.string().regex(/^\d{1,4}$/).pipe(z.coerce.number()),
  boolean: z.boolean(),
  null: z.null(),
  literal: z.literal("yes"),
  "several literals": z.literal(["a", 2, true, null]),
  enum: z.enum(["small", "medium", "large"]),
  "an object's values": z.enum(Colour),
  nullable: short.nullable(),
  optional: z.object({ must: short, may: short.optional() }),
  nullish: z.object({ must: short, may: short.nullish() }),
  default: z.object({ must: short, size: z.enum(["S", "M"]).default("M") }),
  catch: z.object({ size: z.enum(["S", "M"]).catch("M") }),
  union: z.union([short, count, z.boolean()]),
  "a union of objects": z.union([person, z.object({ error: short })]),
  "a discriminated union": z.discriminatedUnion("kind", [cat, dog]),
  "a list of a discriminated union": z.array(z.discriminatedUnion("kind", [cat, dog])).min(1).max(2),
  intersection: z.intersection(z.object({ a: count }), z.object({ b: short })),
  "an extended object": person.extend({ email: z.email().max(30) }),
  picked: person.pick({ name: true }),
  partial: person.partial(),
  strict: z.strictObject({ a: count }),
  passthrough: z.looseObject({ a: count }).refine(() => true),
  "with a catchall": z.object({ a: count }).catchall(count),
  nested: z.object({ people: z.array(person).min(1).max(2), place: z.object({ city: short }) }),
  array: z.array(count).max(4),
  "an array of at least and at most": z.array(short).min(2).max(3),
  "an array of a length": z.array(z.boolean()).length(3),
  tuple: z.tuple([short, count]),
  "a tuple with a rest": z.tuple([short], count).refine((all) => all.length < 100),
  record: z.record(z.enum(["a", "b"]), count),
  "a record of some keys": z.partialRecord(z.enum(["a", "b"]), count),
  "a record of patterned keys": z.record(z.string().regex(/^[a-c]$/), z.boolean()),
  "recursive, by a getter": tree,
  "recursive, lazily": list,
  refined: count.refine((value) => value >= 0),
  branded: count.brand("Count"),
  readonly: z.array(count).max(3).readonly(),
  described: count.describe("How many there are.").meta({ title: "Count", examples: [3] }),
  "a template literal": z.templateLiteral(["v", z.number().int().min(0).max(9), ".", z.enum(["a", "b"])]),
  any: z.any().describe("A number."),
  "JSON of any kind": z.json().describe("A number."),
};
// Where the schema has no bound, the prompt has one.
const EXAMPLES = {
  "recursive, by a getter": '{"label": "leaf", "children": []}',
  "recursive, lazily": '{"head": 1, "tail": null}',
};

let failed = 0;
for (const [name, construct] of Object.entries(CONSTRUCTS))
  try {
    const example = EXAMPLES[name];
    await generateObject({
      model,
      schema: z.object({ value: construct }),
      prompt: example
        ? `Answer with exactly this JSON: {"value": ${example}}`
        : `Write a short example of ${name} as JSON.`,
      temperature: 0,
      maxOutputTokens: 200,
      maxRetries: 0,
    });
    console.log(`  ok ${name}`);
  } catch (error) {
    failed += 1;
    const sent = error.requestBodyValues?.response_format?.json_schema?.schema;
    console.log(`  FAILED ${name}: ${error.message} ${error.text ?? ""}`, sent ? JSON.stringify(sent) : "");
  }
const total = Object.keys(CONSTRUCTS).length;
console.log(`  ${total - failed} of ${total} constructs`);
process.exit(failed ? 1 : 0);
