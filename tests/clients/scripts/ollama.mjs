// ollama for JavaScript: chat, by Ollama's own API.

import { Ollama } from "ollama";
import {
  FORECAST_SCHEMA, KEY, MODEL, ONE_CALL, QUESTION, SYSTEM, TIME_SCHEMA, TWO_CALLS, UNKNOWN, URL, WEATHER_SCHEMA,
  assert, checkAnswer, checkForecast, functions, raised, run,
} from "./client_checks.mjs";

const client = new Ollama({ host: URL, headers: { Authorization: `Bearer ${KEY}` } });
const said = (text) => [{ role: "system", content: SYSTEM }, { role: "user", content: text }];
const tools = Object.entries({ get_weather: WEATHER_SCHEMA, get_time: TIME_SCHEMA }).map(([name, parameters]) => ({
  type: "function", function: { name, description: name, parameters },
}));

async function ask(options, stream) {
  const answer = await client.chat({ model: MODEL, ...options, stream });
  if (!stream) return [answer];
  const parts = [];
  for await (const part of answer) parts.push(part);
  return parts;
}

// Calls tools until the model answers in words; returns these.
async function runTools(text, stream) {
  const messages = said(text);
  for (let turn = 0; turn < 4; turn++) {
    const parts = await ask({ messages, tools }, stream);
    const calls = parts.flatMap((part) => part.message.tool_calls ?? []);
    if (!calls.length) return parts.map((part) => part.message.content).join("");
    messages.push({ role: "assistant", content: "", tool_calls: calls });
    for (const { function: { name, arguments: given } } of calls) {
      messages.push({ role: "tool", tool_name: name, content: functions[name](given) });
    }
  }
  throw new Error("no answer after four turns");
}

await run("ollama", {
  plain: async () => {
    const [answer] = await ask({ messages: said("Say hello."), options: { num_predict: 16 } }, false);
    assert(answer.message.content && answer.eval_count <= 16, answer);
    assert((await client.list()).models.some((model) => model.model.startsWith(MODEL)), "not in the list");
    assert((await client.show({ model: MODEL })).capabilities.includes("tools"), "no tools");
  },
  streaming: async () => {
    const parts = await ask({ messages: said("Say hello."), options: { num_predict: 16 } }, true);
    assert(parts.length > 5 && parts.at(-1).done, parts);
  },
  tool: async () => checkAnswer(await runTools(ONE_CALL, false), "get_weather"),
  parallel: async () => checkAnswer(await runTools(TWO_CALLS, false), "get_weather", "get_time"),
  streamed_tool: async () => checkAnswer(await runTools(TWO_CALLS, true), "get_weather", "get_time"),
  required: null,
  structured: async () => {
    const [answer] = await ask({ messages: said(QUESTION), format: FORECAST_SCHEMA, options: { num_predict: 200 } }, false);
    checkForecast(JSON.parse(answer.message.content));
  },
  error: async () => {
    const unknown = await raised(() => client.chat({ model: UNKNOWN, messages: said("Hello") }));
    assert(unknown.status_code === 404 && unknown.message.includes(UNKNOWN), String(unknown));
  },
});
