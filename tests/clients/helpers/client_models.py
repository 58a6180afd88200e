"""For the scripts of clients that take pydantic models: the structured answer that `client_checks` checks."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field


class Forecast(BaseModel):
    """A forecast of the weather."""

    city: Literal["Paris", "Rome"]
    days: Annotated[int, Field(ge=1, le=9)]
    summary: Annotated[str, Field(max_length=40)]
