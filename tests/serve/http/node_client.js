// The official client for Node drives a server: node node_client.js BASE_URL. Prints one JSON object of what it saw.
const OpenAI = require("openai");

async function main() {
  const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
  const seen = {};
  const messages = [{ role: "user", content: "Weather?" }];

  for await (const model of client.models.list()) seen.model = model.id;

  const whole = await client.chat.completions.create({ model: "fake", messages });
  seen.whole = whole.choices[0].message.content;

  seen.streamed = "";
  const stream = await client.chat.completions.create({
    model: "fake", messages, stream: true, stream_options: { include_usage: true },
  });
  for await (const chunk of stream) {
    seen.streamed += chunk.choices[0]?.delta?.content ?? "";
    if (chunk.usage) seen.tokens = chunk.usage.completion_tokens;
  }

  // The client's own loop: it calls the function and asks again with its result.
  seen.asked = [];
  const loop = client.chat.completions.runTools({
    model: "fake",
    messages,
    tools: [{
      type: "function",
      function: {
        name: "get_weather",
        description: "Weather of a city.",
        parameters: { type: "object", properties: { days: { type: "integer" } }, required: ["days"] },
        parse: JSON.parse,
        function: ({ days }) => { seen.asked.push(days); return "sunny"; },
      },
    }],
  });
  seen.final = await loop.finalContent();

  const format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema: {
    type: "object", properties: { ok: { type: "boolean" } }, required: ["ok"], additionalProperties: false } } };
  const parsed = await client.chat.completions.parse({ model: "fake", messages, response_format: format });
  seen.parsed = parsed.choices[0].message.parsed;

  const first = await client.responses.create({ model: "fake", input: "Weather?" });
  seen.response = first.output_text;
  const events = [];
  for await (const event of await client.responses.create({
    model: "fake", input: "And then?", previous_response_id: first.id, stream: true,
  })) events.push(event.type);
  seen.events = [events[0], events.at(-1)];

  const embedded = await client.embeddings.create({ model: "fake", input: ["a", "bc"] });
  seen.embeddings = embedded.data.map((one) => one.embedding.length);

  try {
    await client.chat.completions.create({ model: "fake", messages, temperature: 101 });
  } catch (error) {
    seen.error = [error.constructor.name, error.status, error.message];
  }
  console.log(JSON.stringify(seen));
}

main().catch((error) => { console.error(error); process.exit(1); });
