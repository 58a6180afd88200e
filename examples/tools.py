"""A tool that the model must call. `tool_choice: required` holds its arguments to the schema while they are sampled."""

import json

from openai import OpenAI

client = OpenAI()  # OPENAI_BASE_URL, OPENAI_API_KEY
model = client.models.list().data[0].id

parameters = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}, "days": {"type": "integer", "enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
tools = [{"type": "function", "function": {"name": "get_weather", "parameters": parameters, "strict": True}}]


def get_weather(city: str, days: int) -> str:
    return f"{city}: sun for {days} days"


messages = [{"role": "user", "content": "How will the weather in Paris be tomorrow?"}]
turn = client.chat.completions.create(model=model, messages=messages, tools=tools, tool_choice="required")
message = turn.choices[0].message
messages.append(message.model_dump(exclude_none=True))
for call in message.tool_calls:
    result = get_weather(**json.loads(call.function.arguments))
    print(f"{call.function.name}({call.function.arguments}) -> {result}")
    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

turn = client.chat.completions.create(model=model, messages=messages, tools=tools, tool_choice="none", max_tokens=60)
print(turn.choices[0].message.content)
