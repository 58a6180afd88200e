"""Four agents over one long prompt: it is computed once, and each agent computes its own task alone."""

import asyncio

from openai import AsyncOpenAI

RULES = "You are a careful engineer. " + " ".join(f"Rule {n}: check step {n} before step {n + 1}." for n in range(80))
TASKS = ["Name a risk.", "Write a test.", "Review the plan.", "Say what is missing."]


async def ask(client: AsyncOpenAI, model: str, task: str) -> str:
    messages = [{"role": "system", "content": RULES}, {"role": "user", "content": task}]
    answer = await client.chat.completions.create(model=model, messages=messages, max_tokens=24, temperature=0)
    usage = answer.usage
    cached = usage.prompt_tokens_details.cached_tokens
    return f"{task:<22} {cached:>5} of {usage.prompt_tokens} prompt tokens cached"


async def main() -> None:
    async with AsyncOpenAI() as client:
        model = (await client.models.list()).data[0].id
        # The first agent computes the shared prompt, and the others wait for it rather than compute it again.
        print("together")
        print("\n".join(await asyncio.gather(*(ask(client, model, task) for task in TASKS))))
        print("once more")
        print("\n".join(await asyncio.gather(*(ask(client, model, task) for task in TASKS))))


asyncio.run(main())
