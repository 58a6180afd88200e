// Frameworks for agents in JavaScript: langchain and Mastra; CLIENT names the one that is installed.
import {
  FORECAST_SCHEMA, KEY, MODEL, ONE_CALL, QUESTION, SYSTEM, TWO_CALLS, UNKNOWN, V1,
  assert, checkAnswer, checkForecast, functions, raised, run,
} from "./client_checks.mjs";
import { z } from "zod";

const WEATHER = z.object({ city: z.string().describe("The name of the city.") });
const TIME = z.object({ zone: z.string().describe("The name of the time zone.") });
const FORECAST = z.object({
  city: z.enum(["Paris", "Rome"]), days: z.number().int().min(1).max(9), summary: z.string().max(40),
});

async function langchain() {
  const { createAgent, tool } = await import("langchain");
  const { ChatOpenAI } = await import("@langchain/openai");
  const tools = [
    tool(functions.get_weather, { name: "get_weather", description: "The weather in a city", schema: WEATHER }),
    tool(functions.get_time, { name: "get_time", description: "The time in a zone", schema: TIME }),
  ];
  const make = (name = MODEL, maxTokens = 200) => new ChatOpenAI({
    model: name, apiKey: KEY, maxTokens, maxRetries: 0, timeout: 120000, configuration: { baseURL: V1 },
  });
  const agent = () => createAgent({ model: make(), tools, systemPrompt: SYSTEM });
  const said = (text) => ({ messages: [{ role: "user", content: text }] });
  return {
    say: async (name) => (await make(name, 16).invoke("Say hello.")).content,
    stream: async () => {
      const pieces = [];
      for await (const piece of await make(MODEL, 16).stream("Say hello.")) if (piece.content) pieces.push(piece.content);
      return pieces;
    },
    act: async (text) => (await agent().invoke(said(text))).messages.at(-1).content,
    actStreamed: async (text) => {
      let last;
      for await (const state of await agent().stream(said(text), { streamMode: "values" })) last = state;
      return last.messages.at(-1).content;
    },
    force: async () => {
      const forecast = { name: "forecast", description: "Keeps a forecast.", parameters: FORECAST_SCHEMA, strict: true };
      const bound = make().bindTools([{ type: "function", function: forecast }], { tool_choice: "required" });
      return (await bound.invoke(QUESTION)).tool_calls[0].args;
    },
    fill: () => make().withStructuredOutput(FORECAST, { method: "jsonSchema" }).invoke(QUESTION),
  };
}

async function mastra() {
  const { Agent } = await import("@mastra/core/agent");
  const { createTool } = await import("@mastra/core/tools");
  const { createOpenAICompatible } = await import("@ai-sdk/openai-compatible");
  const provider = createOpenAICompatible({
    name: "moeserve", baseURL: V1, apiKey: KEY, includeUsage: true, supportsStructuredOutputs: true,
  });
  const tools = {
    get_weather: createTool({
      id: "get_weather", description: "The weather in a city", inputSchema: WEATHER,
      execute: async (input) => functions.get_weather(input.context ?? input),
    }),
    get_time: createTool({
      id: "get_time", description: "The time in a zone", inputSchema: TIME,
      execute: async (input) => functions.get_time(input.context ?? input),
    }),
  };
  const make = (name = MODEL, own = {}) => new Agent({
    id: "assistant", name: "assistant", instructions: SYSTEM, model: provider(name), maxRetries: 0, tools: own,
  });
  const short = { modelSettings: { maxOutputTokens: 16, maxRetries: 0 } };
  const forecast = createTool({
    id: "forecast", description: "Keeps a forecast.", inputSchema: FORECAST, execute: async () => "kept",
  });
  return {
    say: async (name) => (await make(name).generate("Say hello.", short)).text,
    stream: async () => {
      const pieces = [];
      for await (const piece of (await make().stream("Say hello.", short)).textStream) pieces.push(piece);
      return pieces;
    },
    act: async (text) => (await make(MODEL, tools).generate(text)).text,
    actStreamed: async (text) => (await make(MODEL, tools).stream(text)).text,
    force: async () => {
      const answer = await make(MODEL, { forecast }).generate(QUESTION, { toolChoice: "required", maxSteps: 1 });
      const call = answer.toolCalls[0];
      return call.payload?.args ?? call.args ?? call.input;
    },
    fill: async () => (await make().generate(QUESTION, { structuredOutput: { schema: FORECAST } })).object,
  };
}

const framework = await { "langchain-js": langchain, mastra }[process.env.CLIENT]();

await run("chat", {
  plain: async () => assert(await framework.say(MODEL)),
  streaming: async () => {
    const pieces = await framework.stream();
    assert(pieces.length > 3, pieces);
  },
  tool: async () => checkAnswer(await framework.act(ONE_CALL), "get_weather"),
  parallel: async () => checkAnswer(await framework.act(TWO_CALLS), "get_weather", "get_time"),
  streamed_tool: async () => checkAnswer(await framework.actStreamed(ONE_CALL), "get_weather"),
  required: async () => checkForecast(await framework.force()),
  structured: async () => checkForecast(await framework.fill()),
  error: async () => {
    const error = await raised(() => framework.say(UNKNOWN));
    assert(`${error} ${error.cause} ${JSON.stringify(error)}`.includes("does not exist"), `${error}`);
  },
});
