// openai for JavaScript: chat completions and responses.

import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import {
  FORECAST_SCHEMA, KEY, MODEL, ONE_CALL, QUESTION, SYSTEM, TIME_SCHEMA, TWO_CALLS, UNKNOWN, V1, WEATHER_SCHEMA,
  assert, checkAnswer, checkForecast, functions, raised, run,
} from "./client_checks.mjs";

const client = new OpenAI({ baseURL: V1, apiKey: KEY, maxRetries: 0, timeout: 120_000 });
const said = (text) => [{ role: "system", content: SYSTEM }, { role: "user", content: text }];
const Forecast = z.object({
  city: z.enum(["Paris", "Rome"]),
  days: z.number().int().min(1).max(9),
  summary: z.string().max(40),
});
const schemas = { get_weather: WEATHER_SCHEMA, get_time: TIME_SCHEMA };
const runnable = Object.entries(schemas).map(([name, parameters]) => ({
  type: "function",
  function: { name, description: name, parameters, function: functions[name], parse: JSON.parse },
}));
const forecastTool = { type: "function", function: { name: "forecast", parameters: FORECAST_SCHEMA, strict: true } };

async function runTools(text, stream) {
  const runner = client.chat.completions.runTools({ model: MODEL, messages: said(text), tools: runnable, stream });
  return await runner.finalContent();
}

await run("chat", {
  plain: async () => {
    const answer = await client.chat.completions.create({ model: MODEL, messages: said("Say hello."), max_tokens: 16 });
    assert(answer.choices[0].message.content, answer);
    assert(answer.usage.completion_tokens <= 16, answer);
    assert(answer._request_id, "no request id");
  },
  streaming: async () => {
    const stream = client.chat.completions.stream({
      model: MODEL, messages: said("Say hello."), max_tokens: 16, stream_options: { include_usage: true },
    });
    const pieces = [];
    stream.on("content", (piece) => pieces.push(piece));
    const text = await stream.finalContent();
    assert(pieces.join("") === text && pieces.length > 3, pieces);
    assert((await stream.totalUsage()).completion_tokens <= 16, "usage");
  },
  tool: async () => checkAnswer(await runTools(ONE_CALL, false), "get_weather"),
  parallel: async () => checkAnswer(await runTools(TWO_CALLS, false), "get_weather", "get_time"),
  streamed_tool: async () => checkAnswer(await runTools(TWO_CALLS, true), "get_weather", "get_time"),
  required: async () => {
    const answer = await client.chat.completions.create({
      model: MODEL, messages: said(QUESTION), tools: [forecastTool], tool_choice: "required", max_tokens: 200,
    });
    checkForecast(JSON.parse(answer.choices[0].message.tool_calls[0].function.arguments));
  },
  structured: async () => {
    const answer = await client.chat.completions.parse({
      model: MODEL, messages: said(QUESTION), max_tokens: 200, response_format: zodResponseFormat(Forecast, "forecast"),
    });
    checkForecast(answer.choices[0].message.parsed);
  },
  error: async () => {
    const unknown = await raised(() => client.chat.completions.create({ model: UNKNOWN, messages: said("Hello") }));
    assert(unknown instanceof OpenAI.NotFoundError && unknown.code === "model_not_found", String(unknown));
  },
});

const flatTools = Object.entries(schemas).map(([name, parameters]) => ({
  type: "function", name, description: name, parameters, strict: true,
}));

async function runResponses(text, streamed) {
  const input = [{ role: "user", content: text }];
  for (let turn = 0; turn < 4; turn++) {
    const options = { model: MODEL, input, tools: flatTools };
    const answer = streamed
      ? await client.responses.stream(options).finalResponse()
      : await client.responses.create(options);
    const calls = answer.output.filter((item) => item.type === "function_call");
    if (!calls.length) return answer.output_text;
    input.push(...answer.output);
    for (const call of calls) {
      const output = functions[call.name](JSON.parse(call.arguments));
      input.push({ type: "function_call_output", call_id: call.call_id, output });
    }
  }
  throw new Error("no answer after four turns");
}

await run("responses", {
  plain: async () => {
    const answer = await client.responses.create({ model: MODEL, input: "Say hello.", max_output_tokens: 16 });
    assert(answer.output_text && answer.usage.output_tokens <= 16, answer);
  },
  streaming: async () => {
    const stream = client.responses.stream({ model: MODEL, input: "Say hello.", max_output_tokens: 16 });
    const pieces = [];
    stream.on("response.output_text.delta", (event) => pieces.push(event.delta));
    const answer = await stream.finalResponse();
    assert(pieces.join("") === answer.output_text && pieces.length > 3, pieces);
  },
  tool: async () => checkAnswer(await runResponses(ONE_CALL, false), "get_weather"),
  parallel: async () => checkAnswer(await runResponses(TWO_CALLS, false), "get_weather", "get_time"),
  streamed_tool: async () => checkAnswer(await runResponses(TWO_CALLS, true), "get_weather", "get_time"),
  required: async () => {
    const tool = { type: "function", name: "forecast", parameters: FORECAST_SCHEMA, strict: true };
    const answer = await client.responses.create({
      model: MODEL, input: QUESTION, tools: [tool], tool_choice: "required", max_output_tokens: 200,
    });
    checkForecast(JSON.parse(answer.output.find((item) => item.type === "function_call").arguments));
  },
  structured: async () => {
    const answer = await client.responses.parse({
      model: MODEL, input: QUESTION, max_output_tokens: 200, text: { format: zodTextFormat(Forecast, "forecast") },
    });
    checkForecast(answer.output_parsed);
  },
  error: async () => {
    const unknown = await raised(() => client.responses.create({ model: UNKNOWN, input: "Hello" }));
    assert(unknown instanceof OpenAI.NotFoundError && unknown.code === "model_not_found", String(unknown));
  },
});
