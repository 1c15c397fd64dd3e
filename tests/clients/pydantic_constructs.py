"""Types as people write them for Pydantic, each of which a client asks the server to fill in."""

from __future__ import annotations

import datetime as dt
import ipaddress
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum, IntEnum
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NamedTuple, NotRequired, TypeVar
from uuid import UUID

from pydantic import (
    UUID4,
    AliasChoices,
    AnyUrl,
    AwareDatetime,
    Base64Str,
    BaseModel,
    ByteSize,
    ConfigDict,
    EmailStr,
    Field,
    FutureDate,
    HttpUrl,
    Json,
    NegativeInt,
    NonNegativeFloat,
    PastDate,
    PositiveInt,
    RootModel,
    SecretStr,
    StrictBool,
    StrictInt,
    StringConstraints,
    computed_field,
    conint,
    conlist,
    constr,
    create_model,
    field_validator,
)
from typing_extensions import TypedDict  # which Pydantic needs before Python 3.12

Short = Annotated[str, Field(max_length=12)]
Count = Annotated[int, Field(ge=0, le=99)]
Item = TypeVar("Item")


class Colour(Enum):
    RED = "red"
    GREEN = "green"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Mixed(Enum):
    TEXT = "text"
    NUMBER = 2


class Person(BaseModel):
    """Somebody."""

    name: Short
    age: Count = Field(description="In years.", examples=[30])


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(ge=1, le=9)


class Dog(BaseModel):
    kind: Literal["dog"]
    name: Short


class Tree(BaseModel):
    label: Short
    children: list[Tree] = Field(max_length=1)


class Linked(BaseModel):
    head: Count
    tail: Linked | None


class Page(BaseModel, Generic[Item]):
    items: list[Item] = Field(min_length=1, max_length=2)
    has_more: bool


class Forbidding(BaseModel):
    model_config = ConfigDict(extra="forbid")
    a: Count


class Allowing(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: Count


class Aliased(BaseModel):
    model_config = ConfigDict(populate_by_name=True)
    first_name: Short = Field(alias="firstName")
    last_name: Short = Field(validation_alias=AliasChoices("lastName", "surname"))


class Defaults(BaseModel):
    must: Short
    size: Literal["S", "M"] = "M"
    tags: Annotated[list[Short], Field(max_length=2)] = Field(default_factory=list)


class Validated(BaseModel):
    even: Count

    @field_validator("even")
    @classmethod
    def _is_count(cls, value: int) -> int:
        assert value >= 0
        return value

    @computed_field  # not asked for, as it is computed
    @property
    def half(self) -> float:
        return self.even / 2


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, title="Kept", json_schema_extra={"examples": [{"a": 1}]})
    a: Count


class Movie(TypedDict):
    title: Short
    year: NotRequired[Annotated[int, Field(ge=1900, le=2100)]]


class Point(NamedTuple):
    x: Count
    y: Count


@dataclass
class Parcel:
    weight: Annotated[float, Field(gt=0, lt=100)]
    to: list[Colour] = field(default_factory=list)


class Digits(RootModel[Annotated[list[Count], Field(max_length=3)]]):
    """A list by itself."""


CONSTRUCTS: dict[str, Any] = {
    "str": Short,
    "int": Annotated[int, Field(ge=-1000, le=1000)],
    "float": Annotated[float, Field(ge=-1000, le=1000)],
    "bool": bool,
    "None": None,
    "Optional": Short | None,
    "Literal": Literal["yes", "no"],
    "Literal of several types": Literal["a", 2, True] | None,
    "Enum": Colour,
    "IntEnum": Level,
    "Enum of several types": Mixed,
    "Union": Short | Count | bool,
    "Union of models": Person | Forbidding,
    "discriminated Union": Annotated[Cat | Dog, Field(discriminator="kind")],
    "list of a discriminated Union": Annotated[
        list[Annotated[Cat | Dog, Field(discriminator="kind")]], Field(min_length=1, max_length=2)
    ],
    "min_length and max_length": Annotated[str, Field(min_length=3, max_length=8)],
    "pattern": Annotated[str, Field(pattern=r"^[A-Z]{2}-\d{3}$")],
    "constr": constr(strip_whitespace=True, to_lower=True, max_length=8, pattern="^[a-z]+$"),
    "StringConstraints": Annotated[str, StringConstraints(min_length=2, max_length=4)],
    "gt and lt": Annotated[float, Field(gt=0, lt=1)],
    "multiple_of": Annotated[int, Field(multiple_of=5, ge=0, le=100)],
    "conint": conint(ge=1, le=10),
    "PositiveInt": Annotated[PositiveInt, Field(le=1000)],
    "NegativeInt": Annotated[NegativeInt, Field(ge=-1000)],
    "NonNegativeFloat": Annotated[NonNegativeFloat, Field(le=10)],
    "StrictInt": Annotated[StrictInt, Field(ge=0, le=9)],
    "StrictBool": StrictBool,
    "Decimal": Annotated[Decimal, Field(ge=0, le=1000)],
    "Decimal of places": Annotated[Decimal, Field(max_digits=5, decimal_places=2)],
    "datetime": dt.datetime,
    "AwareDatetime": AwareDatetime,
    "date": dt.date,
    "PastDate": PastDate,
    "FutureDate": FutureDate,
    "time": dt.time,
    "timedelta": dt.timedelta,
    "UUID": UUID,
    "UUID4": UUID4,
    "HttpUrl": HttpUrl,
    "AnyUrl": AnyUrl,
    "EmailStr": EmailStr,
    "IPv4Address": ipaddress.IPv4Address,
    "IPv6Address": ipaddress.IPv6Address,
    "IPv4Network": ipaddress.IPv4Network,
    "SecretStr": Annotated[SecretStr, Field(max_length=8)],
    "Path": Path,
    "bytes": Annotated[bytes, Field(max_length=8)],
    "Base64Str": Base64Str,
    "ByteSize": ByteSize,
    "Json": Json[int],
    "list": Annotated[list[Count], Field(max_length=3)],
    "conlist": conlist(Short, min_length=2, max_length=3),
    "set": Annotated[set[Count], Field(max_length=3)],
    "frozenset of an Enum": frozenset[Colour],
    "tuple": tuple[Short, Count, bool],
    "tuple of any length": Annotated[tuple[Count, ...], Field(max_length=3)],
    "Sequence": Annotated[Sequence[Count], Field(max_length=3)],
    "dict": Annotated[dict[Short, Count], Field(max_length=2)],
    "dict of patterned keys": Annotated[
        dict[Annotated[str, Field(pattern="^[a-c]$")], Count], Field(max_length=2)
    ],
    "dict of an Enum": dict[Colour, Count],
    "dict of int": Annotated[dict[int, Short], Field(max_length=2)],
    "dict of models": Annotated[dict[Short, Person], Field(min_length=1, max_length=2)],
    "model": Person,
    "nested": Page[Person],
    "generic": Page[Count],
    "recursive list": Tree,
    "recursive Optional": Linked,
    "extra=forbid": Forbidding,
    "extra=allow": Allowing,
    "alias": Aliased,
    "defaults": Defaults,
    "validators": Validated,
    "frozen, with an example": Frozen,
    "TypedDict": Movie,
    "NamedTuple": Point,
    "dataclass": Parcel,
    "RootModel": Digits,
    "Any": Any,
}
# Where the schema has no bound, or says less than the type asks for, the prompt says the rest.
EXAMPLES = {
    "AnyUrl": '"https://a.org/"',
    "Base64Str": '"aGk="',
    "ByteSize": "1024",
    "Decimal": "3.5",
    "Decimal of places": "3.25",
    "EmailStr": '"anna@gmail.com"',
    "FutureDate": '"2999-01-01"',
    "HttpUrl": '"https://a.org/"',
    "IPv4Network": '"10.0.0.0/8"',
    "Json": '"3"',
    "PastDate": '"2001-02-03"',
    "Path": '"/tmp/a.txt"',
    "Any": "3",
    "UUID4": '"3f0e1c5a-7d2b-4c1e-9a6f-2b8d4e6f0a1c"',
    "bytes": '"abc"',
    "dataclass": '{"weight": 1.5, "to": ["red"]}',
    "dict of int": '{"1": "one"}',
    "dict of patterned keys": '{"a": 1}',
    "extra=allow": '{"a": 1}',
    "recursive Optional": '{"head": 1, "tail": null}',
    "recursive list": '{"label": "leaf", "children": []}',
    "time": '"14:30:00Z"',
    "timedelta": '"PT5M"',
}


def constructs(answer: Callable[[type[BaseModel], str], Any]) -> Iterator[Callable[[], None]]:
    """Yield a check for each type: a client's answer has a value of it."""
    for name, kind in CONSTRUCTS.items():
        yield _construct(name, create_model("Answer", value=(kind, ...)), answer)


def _construct(
    name: str, form: type[BaseModel], answer: Callable[[type[BaseModel], str], Any]
) -> Callable[[], None]:
    prompt = f"Write a short example of {name} as JSON."
    if name in EXAMPLES:
        prompt = f'Answer with exactly this JSON: {{"value": {EXAMPLES[name]}}}'

    def check() -> None:
        assert isinstance(answer(form, prompt), form)

    check.__name__ = f"a construct: {name}"
    return check
