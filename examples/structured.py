"""An answer that always validates: the schema of a pydantic class is enforced while tokens are sampled."""

from typing import Literal

from openai import OpenAI
from pydantic import BaseModel


class Ticket(BaseModel):
    """A report, sorted: its kind, its urgency and the component at fault."""

    kind: Literal["bug", "question", "wish"]
    urgent: bool
    component: Literal["scheduler", "kernels", "frontend"]


client = OpenAI()  # OPENAI_BASE_URL, OPENAI_API_KEY
model = client.models.list().data[0].id
report = "The service answers 500 as soon as two prompts arrive together. Please help!"
answer = client.chat.completions.parse(
    model=model, messages=[{"role": "user", "content": report}], response_format=Ticket, temperature=0
)
print(answer.choices[0].message.parsed)
