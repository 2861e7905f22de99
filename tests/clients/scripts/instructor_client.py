"""`instructor` against a server that is named in the environment."""

from __future__ import annotations

import os
from typing import Literal

import instructor
import openai
from instructor.core.exceptions import InstructorRetryException
from pydantic import BaseModel, Field

client = openai.OpenAI(base_url=os.environ["BASE_URL"], api_key=os.environ["API_KEY"], max_retries=0)


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)
    role: Literal["cook", "pilot", "nurse"]


ASKED = {
    "model": os.environ["MODEL"],
    "messages": [{"role": "user", "content": "Anna, a pilot, is 31 years old. Who is she?"}],
    "max_tokens": 100,
    "temperature": 0,
    "max_retries": 0,
}
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    patched = instructor.from_openai(client, mode=mode)
    person, raw = patched.chat.completions.create_with_completion(response_model=Person, **ASKED)
    assert isinstance(person, Person) and raw.usage.completion_tokens > 0
    print(mode, person, flush=True)
    *_, last = patched.chat.completions.create_partial(response_model=Person, **ASKED)
    assert last.model_dump() == person.model_dump(), "streamed and whole answers differ"
try:
    patched.chat.completions.create(response_model=Person, **{**ASKED, "model": "nobody"})
except (openai.NotFoundError, InstructorRetryException) as error:
    assert "nobody" in str(error)
else:
    raise AssertionError("a model that is not served answered")
