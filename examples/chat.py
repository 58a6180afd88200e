"""Chat in the terminal. End with an empty line."""

import time

from openai import OpenAI

client = OpenAI()  # OPENAI_BASE_URL, OPENAI_API_KEY
model = client.models.list().data[0].id
messages = []

while question := input("> ").strip():
    messages.append({"role": "user", "content": question})
    begin, first, answer, usage = time.monotonic(), None, "", None
    stream = client.chat.completions.create(
        model=model, messages=messages, max_tokens=200, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        usage = chunk.usage or usage
        if chunk.choices and (text := chunk.choices[0].delta.content):
            first = first or time.monotonic()
            answer += text
            print(text, end="", flush=True)
    messages.append({"role": "assistant", "content": answer})
    cached = usage.prompt_tokens_details.cached_tokens
    waited = (first or time.monotonic()) - begin
    print(f"\n[first token after {waited:.2f} s, {cached} of {usage.prompt_tokens} prompt tokens cached]\n")
