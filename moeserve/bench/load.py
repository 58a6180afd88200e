"""Puts a workload on a server and records what comes back."""

from __future__ import annotations

import asyncio
from time import perf_counter

from moeserve.bench.measurement import RequestRecord
from moeserve.bench.openai_client import ChatClient, Message, RequestFailed
from moeserve.bench.workloads import Conversation, Workload


async def run_workload(client: ChatClient, workload: Workload) -> list[RequestRecord]:
    """Every conversation goes on by itself; places are handed out first come, first served, one request at a time.

    So agents take turns: with 8 of them and 4 places, each waits for a place before its next question.
    """
    places = asyncio.Semaphore(workload.concurrency)
    tasks = [
        asyncio.create_task(_converse(client, conversation, workload.max_tokens, places))
        for conversation in workload.conversations
    ]
    return [record for records in await asyncio.gather(*tasks) for record in records]


async def _converse(
    client: ChatClient, conversation: Conversation, max_tokens: int, places: asyncio.Semaphore
) -> list[RequestRecord]:
    messages: list[Message] = []
    if conversation.system is not None:
        messages.append({"role": "system", "content": conversation.system})
    records: list[RequestRecord] = []
    for turn, question in enumerate(conversation.questions):
        messages.append({"role": "user", "content": question})
        async with places:
            record, text = await _ask(client, messages, max_tokens, conversation, cold=conversation.cold and turn == 0)
        records.append(record)
        if record.error is not None:
            num_left = len(conversation.questions) - turn - 1
            records += [_not_sent(conversation.variant, record.ended_at)] * num_left
            break
        messages.append({"role": "assistant", "content": text})
    return records


async def _ask(
    client: ChatClient, messages: list[Message], max_tokens: int, conversation: Conversation, *, cold: bool
) -> tuple[RequestRecord, str]:
    began = perf_counter()
    try:
        response, answer = await client.chat(messages, max_tokens)
    except RequestFailed as error:
        return RequestRecord(conversation.variant, cold, began, perf_counter(), error=str(error)), ""
    record = RequestRecord(
        variant=conversation.variant,
        cold=cold,
        sent_at=response.sent_at,
        ended_at=response.ended_at,
        event_times=answer.event_times,
        prompt_tokens=answer.prompt_tokens,
        output_tokens=len(answer.event_times) if answer.output_tokens is None else answer.output_tokens,
        cached_tokens=answer.cached_tokens,
    )
    return record, answer.text


def _not_sent(variant: str, at: float) -> RequestRecord:
    return RequestRecord(variant, False, at, at, error="not sent: an earlier turn of the conversation failed")
