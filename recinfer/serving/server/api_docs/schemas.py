"""JSON Schemas of one model's requests and answers, as a protocol gives them to the document."""

from __future__ import annotations

from typing import Any

__all__ = ["FLOAT", "ModelSchemas", "Schema", "array_of", "object_of", "open_object"]

FLOAT = {"type": "number", "format": "float"}

Schema = dict[str, Any]


class ModelSchemas:
    """The schemas and examples of one model, over all protocols.

    Every object is a component: tools that write clients name a class after each, and find no good names for objects within
    objects.

    Attributes:
        prefix: of the names of all components, and of operations.
        components: JSON Schemas by name.
        examples: requests that the model answers, by the name of their schema (without the prefix) and a name of their own.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.components: dict[str, Schema] = {}
        self.examples: dict[str, dict[str, Any]] = {}

    def add(self, name: str, schema: Schema) -> Schema:
        """Make ``schema`` a component; a reference to it."""
        assert self.prefix + name not in self.components, f"two protocols have a schema {name}"
        self.components[self.prefix + name] = schema
        return self.reference(name)

    def reference(self, name: str) -> Schema:
        """A reference to the component ``name``."""
        return {"$ref": f"#/components/schemas/{self.prefix}{name}"}

    def body(self, name: str) -> dict[str, Any]:
        """The content of a request with the schema ``name``, with its examples."""
        values = {key: {"value": value} for key, value in self.examples[name].items()}
        return {"schema": self.reference(name), "examples": values}


def array_of(items: Schema, *sizes: int | None) -> Schema:
    """Lists in lists of these sizes, the outermost first; None is any."""
    for size in reversed(sizes):
        items = {"type": "array", "items": items} | ({} if size is None else {"minItems": size, "maxItems": size})
    return items


def object_of(properties: dict[str, Schema], required: list[str]) -> Schema:
    """An object with these properties and no others."""
    return open_object(properties, required) | {"additionalProperties": False}


def open_object(properties: dict[str, Schema], required: list[str]) -> Schema:
    """An object with these properties, and maybe others."""
    return {"type": "object", "properties": dict(properties), "required": list(required)}
