// @anthropic-ai/sdk: messages.

import Anthropic from "@anthropic-ai/sdk";
import {
  FORECAST_SCHEMA, KEY, MODEL, ONE_CALL, QUESTION, SYSTEM, TIME_SCHEMA, TWO_CALLS, UNKNOWN, URL, WEATHER_SCHEMA,
  assert, checkAnswer, checkForecast, functions, raised, run,
} from "./client_checks.mjs";

const client = new Anthropic({ baseURL: URL, apiKey: KEY, maxRetries: 0, timeout: 120_000 });
const said = (text) => [{ role: "user", content: text }];
const ask = { model: MODEL, max_tokens: 200, system: SYSTEM };
const tools = [
  { name: "get_weather", description: "Return the weather in a city.", input_schema: WEATHER_SCHEMA },
  { name: "get_time", description: "Return the time in a zone.", input_schema: TIME_SCHEMA },
];

async function runTools(text, streamed) {
  const messages = said(text);
  for (let turn = 0; turn < 4; turn++) {
    const options = { ...ask, messages, tools };
    const answer = streamed
      ? await client.messages.stream(options).finalMessage()
      : await client.messages.create(options);
    const calls = answer.content.filter((block) => block.type === "tool_use");
    assert(answer.stop_reason === (calls.length ? "tool_use" : "end_turn"), answer);
    if (!calls.length) return answer.content.map((block) => block.text ?? "").join("");
    const results = calls.map((call) => ({
      type: "tool_result", tool_use_id: call.id, content: functions[call.name](call.input),
    }));
    messages.push({ role: "assistant", content: answer.content }, { role: "user", content: results });
  }
  throw new Error("no answer after four turns");
}

await run("messages", {
  plain: async () => {
    const answer = await client.messages.create({ ...ask, max_tokens: 16, messages: said("Say hello.") });
    assert(answer.content[0].text && answer.usage.output_tokens <= 16, answer);
    assert((await client.messages.countTokens({ model: MODEL, messages: said("Say hello.") })).input_tokens > 0, "count");
  },
  streaming: async () => {
    const stream = client.messages.stream({ ...ask, max_tokens: 16, messages: said("Say hello.") });
    const pieces = [];
    stream.on("text", (piece) => pieces.push(piece));
    assert((await stream.finalText()) === pieces.join("") && pieces.length > 3, pieces);
  },
  tool: async () => checkAnswer(await runTools(ONE_CALL, false), "get_weather"),
  parallel: async () => checkAnswer(await runTools(TWO_CALLS, false), "get_weather", "get_time"),
  streamed_tool: async () => checkAnswer(await runTools(TWO_CALLS, true), "get_weather", "get_time"),
  required: async () => {
    const tool = { name: "forecast", description: "Keep a forecast.", input_schema: FORECAST_SCHEMA };
    const answer = await client.messages.create({
      ...ask, messages: said(QUESTION), tools: [tool], tool_choice: { type: "any" },
    });
    checkForecast(answer.content.find((block) => block.type === "tool_use").input);
  },
  structured: async () => {
    const answer = await client.messages.create({
      ...ask, messages: said(QUESTION), output_config: { format: { type: "json_schema", schema: FORECAST_SCHEMA } },
    });
    checkForecast(JSON.parse(answer.content.at(-1).text));
  },
  error: async () => {
    const unknown = await raised(() =>
      client.messages.create({ model: UNKNOWN, max_tokens: 1, messages: said("Hello") }));
    assert(unknown instanceof Anthropic.NotFoundError, String(unknown));
    assert(unknown.error.error.type === "not_found_error", unknown.error);
  },
});
