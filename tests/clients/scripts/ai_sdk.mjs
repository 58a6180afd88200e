// The AI SDK with its providers for chat completions, responses and messages.

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import {
  KEY, MODEL, ONE_CALL, QUESTION, SYSTEM, TWO_CALLS, UNKNOWN, V1,
  assert, checkAnswer, checkForecast, functions, raised, run,
} from "./client_checks.mjs";

const Forecast = z.object({
  city: z.enum(["Paris", "Rome"]),
  days: z.number().int().min(1).max(9),
  summary: z.string().max(40),
});
const tools = {
  get_weather: tool({
    description: "Return the weather in a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: async (input) => functions.get_weather(input),
  }),
  get_time: tool({
    description: "Return the time in a zone.",
    inputSchema: z.object({ zone: z.string() }),
    execute: async (input) => functions.get_time(input),
  }),
};
const compatible = createOpenAICompatible({
  name: "moeserve", baseURL: V1, apiKey: KEY, includeUsage: true, supportsStructuredOutputs: true,
});
const openai = createOpenAI({ baseURL: V1, apiKey: KEY });
const anthropic = createAnthropic({ baseURL: V1, apiKey: KEY });

function checks(provider) {
  const ask = (prompt, options) => ({
    model: provider(MODEL), system: SYSTEM, prompt, maxOutputTokens: 200, maxRetries: 0, ...options,
  });
  const agent = { tools, stopWhen: stepCountIs(4) };
  const streamed = async (options) => {
    const problems = [];
    const result = streamText({ ...options, onError: ({ error }) => problems.push(error) });
    const pieces = [];
    for await (const piece of result.textStream) pieces.push(piece);
    if (problems.length) throw problems[0];
    return { pieces, usage: await result.usage };
  };
  return {
    plain: async () => {
      const answer = await generateText(ask("Say hello.", { maxOutputTokens: 16 }));
      assert(answer.text && answer.usage.outputTokens <= 16, answer.usage);
    },
    streaming: async () => {
      const { pieces, usage } = await streamed(ask("Say hello.", { maxOutputTokens: 16 }));
      assert(pieces.length > 3 && usage.outputTokens <= 16, pieces, usage);
    },
    tool: async () => checkAnswer((await generateText(ask(ONE_CALL, agent))).text, "get_weather"),
    parallel: async () => {
      const answer = await generateText(ask(TWO_CALLS, agent));
      assert(answer.steps.length === 2, "the calls did not come in one answer");
      checkAnswer(answer.text, "get_weather", "get_time");
    },
    streamed_tool: async () => {
      const { pieces } = await streamed(ask(TWO_CALLS, agent));
      checkAnswer(pieces.join(""), "get_weather", "get_time");
    },
    required: async () => {
      const forecast = tool({ description: "Keep a forecast.", inputSchema: Forecast });
      const answer = await generateText(ask(QUESTION, { tools: { forecast }, toolChoice: "required" }));
      checkForecast(answer.toolCalls[0].input);
    },
    structured: async () => {
      const answer = await generateText(ask(QUESTION, { output: Output.object({ schema: Forecast }) }));
      checkForecast(answer.output);
    },
    error: async () => {
      const unknown = await raised(() => generateText({ model: provider(UNKNOWN), prompt: "Hello", maxRetries: 0 }));
      assert(unknown.statusCode === 404, String(unknown));
    },
  };
}

await run("chat", checks((name) => compatible(name)));
await run("chat (createOpenAI)", checks((name) => openai.chat(name)));
await run("responses", checks((name) => openai(name)));
await run("messages", checks((name) => anthropic(name)));
