// The `openai` package for JavaScript against a server that is named in the environment.
import assert from "node:assert/strict";
import { createRequire } from "node:module";

const OpenAI = createRequire(process.env.MODULES + "/")("openai");
const model = process.env.MODEL;
const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: process.env.API_KEY, maxRetries: 0 });
const messages = [{ role: "user", content: "Name three colours." }];
const asked = { model, messages, temperature: 0, max_tokens: 24 };

const listed = await client.models.list();
assert.deepEqual(listed.data.map((card) => card.id), [model]);

const answer = await client.chat.completions.create(asked);
const text = answer.choices[0].message.content;
assert.ok(text.length > 0 && answer.usage.completion_tokens <= 24);

let streamed = "";
let usage = null;
for await (const chunk of await client.chat.completions.create({
  ...asked,
  stream: true,
  stream_options: { include_usage: true },
})) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(streamed, text);
assert.equal(usage.completion_tokens, answer.usage.completion_tokens);

const several = await client.chat.completions.create({
  ...asked,
  n: 2,
  temperature: 1,
  max_tokens: 4,
  logprobs: true,
  top_logprobs: 2,
});
assert.deepEqual(several.choices.map((choice) => choice.index), [0, 1]);
assert.equal(several.choices[0].logprobs.content[0].top_logprobs.length, 2);

const completion = await client.completions.create({ model, prompt: "One, two,", max_tokens: 4, temperature: 0 });
assert.ok(completion.choices[0].text.length > 0);

const schema = {
  type: "object",
  properties: { city: { type: "string", maxLength: 20 } },
  required: ["city"],
  additionalProperties: false,
};
const structured = await client.chat.completions.create({
  ...asked,
  max_tokens: 60,
  response_format: { type: "json_schema", json_schema: { name: "place", schema, strict: true } },
});
assert.deepEqual(Object.keys(JSON.parse(structured.choices[0].message.content)), ["city"]);

const tool = { type: "function", function: { name: "get_weather", parameters: schema } };
const called = await client.chat.completions.create({
  ...asked,
  max_tokens: 60,
  tools: [tool],
  tool_choice: { type: "function", function: { name: "get_weather" } },
});
const call = called.choices[0].message.tool_calls[0];
assert.equal(call.function.name, "get_weather");
assert.deepEqual(Object.keys(JSON.parse(call.function.arguments)), ["city"]);

// A client that leaves in the middle of its stream.
const left = await client.chat.completions.create({ ...asked, max_tokens: 2000, stream: true });
for await (const chunk of left) {
  if (chunk.choices[0]?.delta?.content) break;
}
await assert.rejects(client.chat.completions.create({ ...asked, temperature: -1 }), OpenAI.BadRequestError);
await assert.rejects(client.chat.completions.create({ ...asked, model: "nobody" }), OpenAI.NotFoundError);
const stranger = client.withOptions({ apiKey: "wrong" });
await assert.rejects(stranger.chat.completions.create(asked), OpenAI.AuthenticationError);
console.log("ok");
