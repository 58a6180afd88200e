// For the scripts of clients in JavaScript: as client_checks.py.

export const URL = process.env.BASE_URL;
export const V1 = `${URL}/v1`;
export const MODEL = process.env.MODEL;
export const KEY = process.env.API_KEY;

export const ONE_CALL = 'Use get_weather({"city": "Paris"}) and tell me what it says.';
export const TWO_CALLS =
  'Use get_weather({"city": "Paris"}) and get_time({"zone": "UTC"}) at once, and tell me what they say.';
export const QUESTION = "What will the weather be like in Rome?";
export const SYSTEM = "You are a helpful assistant.";
export const UNKNOWN = "no-such-model";

export const FORECAST_SCHEMA = {
  type: "object",
  properties: {
    city: { type: "string", enum: ["Paris", "Rome"] },
    days: { type: "integer", minimum: 1, maximum: 9 },
    summary: { type: "string", maxLength: 40 },
  },
  required: ["city", "days", "summary"],
  additionalProperties: false,
};
export const WEATHER_SCHEMA = {
  type: "object",
  properties: { city: { type: "string", description: "The name of the city." } },
  required: ["city"],
  additionalProperties: false,
};
export const TIME_SCHEMA = {
  type: "object",
  properties: { zone: { type: "string", description: "The name of the time zone." } },
  required: ["zone"],
  additionalProperties: false,
};

let called = [];
export const functions = {
  get_weather: ({ city }) => {
    called.push("get_weather");
    return `22 degrees in ${city}`;
  },
  get_time: ({ zone }) => {
    called.push("get_time");
    return `half past nine in ${zone}`;
  },
};

export function assert(condition, ...about) {
  if (!condition) throw new Error(about.map((part) => (typeof part === "string" ? part : JSON.stringify(part))).join(" "));
}

export function checkAnswer(text, ...calls) {
  const made = called;
  called = [];
  assert(JSON.stringify(made) === JSON.stringify(calls), "called", made, "not", calls);
  if (calls.includes("get_weather")) assert(text.includes("22 degrees in Paris"), "no weather in", text);
  if (calls.includes("get_time")) assert(text.includes("half past nine in UTC"), "no time in", text);
}

export function checkForecast(value) {
  assert(value && Object.keys(value).sort().join() === "city,days,summary", value);
  assert(["Paris", "Rome"].includes(value.city), value);
  assert(Number.isInteger(value.days) && value.days >= 1 && value.days <= 9, value);
  assert(typeof value.summary === "string", value);
}

// Returns the error that a function ends with.
export async function raised(promise) {
  let outcome;
  try {
    outcome = await promise();
  } catch (error) {
    return error;
  }
  throw new Error(`served: ${JSON.stringify(outcome)}`);
}

// Returns an error and the first place in the script that it comes from, if that is known.
function describe(error) {
  const place = String(error?.stack).split("\n").find((line) => line.includes(".mjs") && !line.includes("node_modules"));
  const about = error?.responseBody ?? error?.cause?.message ?? "";
  return `${place?.trim() ?? ""}: ${error} ${about}`.slice(0, 1500);
}

// Runs the checks of one API, an object of functions by their names, and prints one JSON line for each; null is a check
// that the client has no way to do.
export async function run(api, checks) {
  for (const [check, act] of Object.entries(checks)) {
    called = [];
    let report = { api, check, ok: act && true, detail: "" };
    try {
      await act?.();
    } catch (error) {
      report = { api, check, ok: false, detail: describe(error) };
    }
    // The runner looks for lines that begin like this.
    console.log(`{"api": ${JSON.stringify(api)}, ${JSON.stringify(report).slice(1).replace(/^"api":"[^"]*",/, "")}`);
  }
}
